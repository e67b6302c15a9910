"""What exports take as the same message, the same reward, and as a text."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench, rows
from trainspan_processing.dataset.published import open_published
from trainspan_processing.export.candidates import RewardedRollout
from trainspan_processing.export.conversations import MessageSpan, RecordedCall, recorded_calls
from trainspan_processing.export.dpo import preference_pairs
from trainspan_processing.export.export import ExportRequest, export
from trainspan_processing.export.kto import judged_examples
from trainspan_processing.export.sft import supervised_examples
from trainspan_processing.text.chat_messages import chat_messages, same_messages
from trainspan_processing.text.dialects import messages_of
from trainspan_processing.text.model_calls import text_flaw
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.telemetry import keys


def ordering(number: int, call_id: str = "call") -> list[dict[str, Any]]:
    function = {"name": "cancel_order", "arguments": {"id": number}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    ]


def test_an_argument_called_id_makes_another_answer() -> None:
    assert same_messages(ordering(7, "a")) == same_messages(ordering(7, "b"))
    assert same_messages(ordering(7)) != same_messages(ordering(8))
    asked = [{"role": "user", "content": "Cancel order 7."}]
    results = [[*asked, *ordering(number), {"role": "tool", "content": "done"}] for number in (7, 8)]
    said = [[{"role": "assistant", "content": text}] for text in ("Order 7 is cancelled.", "Sorry, it was 8.")]
    calls = {
        (name, 0): [
            RecordedCall(None, None, asked, ordering(number), True),
            RecordedCall(None, None, prompt, end, True),
        ]
        for name, number, prompt, end in zip("ab", (7, 8), results, said, strict=True)
    }
    group = [RewardedRollout("a", 0, "g", 1.0), RewardedRollout("b", 0, "g", 0.0)]
    made = preference_pairs({"g": group}, calls.__getitem__, min_reward=None, agents=frozenset())
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in made.rows] == [(asked, ordering(7), ordering(8))]


@pytest.mark.parametrize("kind", ["reasoning", "thinking"])
def test_thoughts_are_kept_whatever_a_client_calls_them(kind: str) -> None:
    wanted = [{"role": "assistant", "content": "4", "reasoning_content": "Two and two."}]
    parts = [{"type": kind, "content": "Two and two."}, {"type": "text", "content": "4"}]
    recorded = json.dumps([{"role": "assistant", "parts": parts}])
    assert chat_messages(messages_of({"gen_ai.output.messages": recorded})[1]) == wanted
    listed = [{"type": kind, kind: "Two and two.", "thinking": "Two and two."}, {"type": "text", "text": "4"}]
    assert chat_messages([{"role": "assistant", "content": listed}]) == wanted


@pytest.mark.parametrize(
    ("asked", "answered", "flaw"),
    [
        ([{"type": "text", "content": "x"}], [{"type": "text", "content": ""}], None),
        ([{"type": "text"}], [{"type": "text", "content": "4"}], "no_messages"),
        ([{"type": "text", "content": "x"}], [{"type": "text"}], "no_answer"),
        ([{"type": "text", "content": "x"}], [{"type": "text", "content": None}], "no_answer"),
        ([{"type": "text", "content": "x"}], [{"type": "thinking"}, {"type": "text", "content": "4"}], "no_answer"),
        ([{"type": "text", "text": "x"}], [{"type": "text", "text": "4"}], None),
    ],
)
def test_texts_that_a_client_did_not_record_are_no_empty_texts(asked: Any, answered: Any, flaw: str | None) -> None:
    """Pydantic AI leaves out `content` with `include_content=False`."""
    attributes = {
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": asked}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": answered, "finish_reason": "stop"}]),
    }
    assert text_flaw(attributes, failed=False) == flaw
    inputs, outputs = messages_of(attributes)
    contents = [message["content"] for message in chat_messages([*inputs, *outputs])]
    assert "None" not in contents
    assert flaw is not None or contents == ["x", answered[0].get("content", "4")]


def test_rewards_that_differ_by_rounding_are_equal_in_every_export() -> None:
    calls = [
        RecordedCall(None, None, [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}], True)
    ]
    group = [RewardedRollout("a", 0, "g", 0.3), RewardedRollout("b", 0, "g", 0.1 + 0.2)]
    options: Any = {"min_reward": None, "agents": frozenset()}
    assert preference_pairs({"g": group}, lambda _: calls, **options).skipped == {"equal_rewards": 1}
    assert judged_examples({"g": group}, lambda _: calls, **options).skipped == {"equal_rewards": 1}
    three = [*group, RewardedRollout("c", 0, "g", 0.0)]
    judged = judged_examples({"g": three}, lambda _: calls, min_reward=0.1 + 0.2, agents=frozenset())
    assert [row["label"] for row in judged.rows] == [True, True, False]
    best = supervised_examples({"g": three}, lambda _: calls, min_reward=None, take_all=False, agents=frozenset())
    assert [source["rollout_id"] for source in best.sources] == ["a"]


def _chat_span(span_id: str, parent: str | None, **more: Any) -> MessageSpan:
    said = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": span_id}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "4"}]}]),
    }
    return MessageSpan("t", span_id, parent, 1, 2, False, {**said, **more})


def test_an_agent_is_named_by_the_call_its_nearest_ancestor_or_its_request() -> None:
    name = keys.GEN_AI_AGENT_NAME
    outer = MessageSpan("t", "outer", None, 0, 9, False, {})
    inner = MessageSpan("t", "inner", "outer", 0, 9, False, {})
    spans = [
        outer,
        inner,
        _chat_span("below", "inner"),
        _chat_span("own", "outer", **{name: "coder"}),
        _chat_span("derived", "outer", **{name: "agent-0123abcd"}),
        _chat_span("alone", None, **{name: "agent-0123abcd"}),
        _chat_span("nameless", None),
    ]

    def agents(*known: MessageSpan, **more: Any) -> dict[str, str | None]:
        return {str(call.prompt[0]["content"]): call.agent for call in recorded_calls(known, **more)}  # type: ignore[index]

    expected = {"below": "planner", "own": "coder", "derived": "planner", "alone": "agent-0123abcd", "nameless": None}
    assert agents(*spans, agents={("t", "outer"): "planner"}) == expected
    named = agents(*spans, agents={("t", "outer"): "planner", ("t", "inner"): "role"})
    assert named == {**expected, "below": "role"}


def test_an_export_knows_the_agents_of_its_dataset(bench: Bench, tmp_path: Path) -> None:
    """OpenInference names the agent on a span above the call; its client's span has the messages."""
    messages = _chat_span("asked", None).attributes
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name)
        node = rollout.span("node", 0.5, 4.0, openinference__span__kind="AGENT", graph__node__id="planner")
        client = rollout.span("client", 0.9, 3.0, parent=node, **messages)
        rollout.call(0, [1, 2, 3], [10, 11], parent=client)
        bench.send(rollout.reward(reward))
    built = bench.build(round_=0, agents="planner")
    assert rows(built)["agent"].to_list() == ["planner", "planner"]
    store, datasets, agents = str(bench.collectors[0].store), [open_published(built.path)], frozenset({"planner"})
    request = ExportRequest("sft", tmp_path / "sft.jsonl", [store], datasets, DatasetSettings(), agents=agents)
    export(request, bench.clock)
    (line,) = request.out.read_text().splitlines()
    assert json.loads(line)["prompt"] == [{"role": "user", "content": "asked"}]
