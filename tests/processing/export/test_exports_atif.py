"""`trainspan export atif`: what a trajectory holds, what an import reads back from it, and Harbor's own validator."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.importers.reading import Seen, read
from tests.processing.conftest import Bench
from tests.processing.support.traces import TestRollout
from trainspan_cli.main import run
from trainspan_processing.dataset.published import open_published
from trainspan_processing.export.atif import SpanTokens, trajectories, trajectory
from trainspan_processing.export.candidates import Examples
from trainspan_processing.export.conversations import CallRecord, MessageSpan, RecordedCall, recorded_calls
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.text.chat_messages import chat_messages
from trainspan_processing.text.dialects import messages_of
from trainspan_processing.text.model_calls import text_flaw
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs

TOOLS = json.dumps([{"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}])


def text(role: str, content: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": [*parts, {"type": "text", "content": content}]}


SYSTEM, ASKED = text("system", "Be good."), text("user", "fix it")
THOUGHT = {"type": "reasoning", "content": "hm"}
CALLS = [
    {"type": "tool_call", "name": "sh", "arguments": {"c": "ls"}, "id": "c1"},
    {"type": "tool_call", "name": "sh", "arguments": '{"c": ', "id": "c2"},
]
LOOKING = {"role": "assistant", "parts": [THOUGHT, {"type": "text", "content": "Looking."}, *CALLS]}
RESULTS = [
    {"role": "tool", "parts": [{"type": "tool_call_response", "response": output, "id": name}]}
    for name, output in (("c1", "a.py"), ("c2", "broken"))
]
DONE = text("assistant", "Done.")
HELP = [text("user", "summarize"), text("assistant", "Short.")]


def _client(rollout: TestRollout, name: str, at: float, asked: list[Any], answer: Any, **more: Any) -> str:
    messages = {"gen_ai__input__messages": json.dumps(asked), "gen_ai__output__messages": json.dumps([answer])}
    usage = {"gen_ai__usage__cost": 0.25, "gen_ai__usage__cache_read__input_tokens": 1}
    attributes = {"gen_ai__operation__name": "chat", "gen_ai__request__model": "policy", **messages, **usage, **more}
    return rollout.span(name, at, at + 0.8, **attributes)


def _rollout(rollout: TestRollout) -> TestRollout:
    """Two calls with tools between them, a sub-agent's call, one that only the policy server recorded, and one cut off."""
    history = [SYSTEM, ASKED, LOOKING, *RESULTS]
    main = {"gen_ai__agent__name": "main", "gen_ai__tool__definitions": TOOLS}
    first = _client(rollout, "a", 1.0, [SYSTEM, ASKED], LOOKING, **main)
    rollout.call(0, [1, 2, 3], [4, 5], at=1.1, parent=first, logprobs=[-0.5, -0.25], gen_ai__tool__definitions=TOOLS)
    inner = _client(rollout, "b", 3.0, HELP[:1], HELP[1], gen_ai__agent__name="helper")
    rollout.call(1, [7], [8], at=3.1, parent=inner)
    last = _client(rollout, "c", 5.0, history, DONE, **main)
    cut = {"gen_ai__tool__definitions": TOOLS, "gen_ai__response__finish_reasons": ["length"]}
    rollout.call(2, [1, 2, 3, 4, 5, 6], [9], at=5.1, parent=last, logprobs=[-0.125], **cut)
    rollout.call(3, [1], [2], at=7.0)
    return rollout.reward(0.5)


def _chat(call: Seen) -> tuple[Any, Any]:
    asked, answered = messages_of(call.attributes)
    return chat_messages(asked), chat_messages(answered)


@pytest.fixture
def exported(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Of three rollouts one is a branch, and one has neither a reward nor a recorded message."""
    silent = bench.rollout("silent")
    silent.call(0, [1], [2])
    bench.send(_rollout(bench.rollout("r")), silent, _rollout(bench.rollout("x", task="t0@r.0@1")))
    out = tmp_path / "trajectories.jsonl"
    store = str(bench.collectors[0].store)
    assert run(["export", "atif", store, str(out), "--run", bench.run_id, "--format", "json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["examples"], done["groups"], done["groups_used"]) == (1, 3, 1)
    assert done["skipped"] == {"branch": 1, "no_messages": 2, "no_text": 1}
    return out


@pytest.mark.ci
def test_a_trajectory_has_steps_tools_tokens_costs_and_sub_agents(exported: Path, bench: Bench) -> None:
    (line,) = exported.read_text().splitlines()
    document = json.loads(line)
    assert document["extra"] | {"run_id": ""} == {
        "rollout_id": f"{bench.run_id}-r",
        "attempt": 0,
        "run_id": "",
        "round": 0,
        "task_id": "t0",
        "reward": 0.5,
    }
    assert document["agent"]["name"] == "main"
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    assert document["final_metrics"] == {
        "total_steps": 4,
        "total_prompt_tokens": 9,
        "total_completion_tokens": 3,
        "total_cached_tokens": 2,
        "total_cost_usd": 0.75,
    }
    (inner,) = document["subagent_trajectories"]
    assert (inner["agent"]["name"], inner["steps"][-1]["message"]) == ("helper", "Short.")
    assert document["steps"][2]["observation"]["results"] == [
        {"source_call_id": "c1", "content": "a.py"},
        {"source_call_id": "c2", "content": "broken"},
    ]
    assert document["steps"][3]["extra"][keys.GEN_AI_FINISH_REASONS] == ["length"]


@pytest.mark.ci
def test_an_import_reads_back_the_same_messages_ids_log_probabilities_and_reward(exported: Path) -> None:
    imported = read(exported)
    (reward,) = imported.records
    assert (reward.attributes[keys.EVALUATION_NAME], reward.attributes[keys.EVALUATION_SCORE]) == ("reward", 0.5)
    assert (reward.trace, reward.attributes[keys.EVALUATION_OF]) == (imported.roots[0].trace, "rollout")
    calls = sorted(imported.calls, key=lambda call: call.end_ns)
    history = [SYSTEM, ASKED, LOOKING, *RESULTS]
    recorded = [([SYSTEM, ASKED], LOOKING), (HELP[:1], HELP[1]), (history, DONE)]
    for call, (asked, answer) in zip(calls, recorded, strict=True):
        expected = {"gen_ai.input.messages": json.dumps(asked), "gen_ai.output.messages": json.dumps([answer])}
        assert _chat(call) == tuple(map(chat_messages, messages_of(expected)))
    packed = (keys.PROMPT_TOKEN_IDS, keys.COMPLETION_TOKEN_IDS)
    assert [[decode_ids(call.attributes[key]) for key in packed] for call in calls] == [
        [[1, 2, 3], [4, 5]],
        [[7], [8]],
        [[1, 2, 3, 4, 5, 6], [9]],
    ]
    assert [decode_logprobs(call.attributes[keys.COMPLETION_LOGPROBS]) for call in calls] == [
        [-0.5, -0.25],
        [-0.5],
        [-0.125],
    ]
    assert [call.attributes["gen_ai.usage.cost"] for call in calls] == [0.25] * 3
    assert [call.attributes[keys.GEN_AI_AGENT_NAME] for call in calls] == ["main", "helper", "main"]
    assert [call.attributes.get(keys.GEN_AI_FINISH_REASONS) for call in calls] == [["stop"], ["stop"], ["length"]]
    assert [json.loads(call.attributes.get(keys.GEN_AI_TOOL_DEFINITIONS, "[]")) for call in calls] == [
        json.loads(TOOLS),
        [],
        json.loads(TOOLS),
    ]


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ROLLOUT = {"rollout_id": "r", "attempt": 0, "run_id": None, "round": None, "task_id": None, "reward": None}


def _trajectory(*calls: RecordedCall, agents: frozenset[str] = frozenset(), **tokens: SpanTokens) -> tuple[Any, Any]:
    examples = Examples()
    stored = {("t", name): of_call for name, of_call in tokens.items()}
    return trajectory(ROLLOUT, calls, stored, agents, examples), dict(examples.skipped)


def test_a_history_without_the_reasoning_goes_on_and_another_history_is_a_copy_in_a_trajectory_of_its_own() -> None:
    asked, thought = _message("user", "q"), _message("assistant", "a", reasoning_content="hm")
    more = [asked, _message("assistant", "a"), _message("user", "r")]
    retried = RecordedCall("m", None, more, [_message("assistant", "c")], is_whole=True)
    document, skipped = _trajectory(
        RecordedCall("m", None, [asked], [thought], is_whole=True),
        RecordedCall("m", None, more, [_message("assistant", "b")], is_whole=True),
        retried,
    )
    assert skipped == {}
    assert [(step["source"], step["message"]) for step in document["steps"]] == [
        ("user", "q"),
        ("agent", "a"),
        ("user", "r"),
        ("agent", "b"),
    ]
    assert document["steps"][1]["reasoning_content"] == "hm"
    (other,) = document["subagent_trajectories"]
    assert [(step["message"], step.get("is_copied_context", False)) for step in other["steps"]] == [
        ("q", False),
        ("a", True),
        ("r", False),
        ("c", False),
    ]


def test_results_find_their_calls_though_ids_are_missing_or_differ_and_other_roles_are_named() -> None:
    function = {"type": "function", "function": {"name": "f", "arguments": {}}}
    asked = [_message("developer", "d"), _message("tool", "stray"), _message("user", "q", name="ann")]
    answer = _message("assistant", "", tool_calls=[function, {**function, "id": "k"}])
    results = [_message("tool", "one", tool_call_id="z"), _message("tool", "two"), _message("tool", "three")]
    document, _ = _trajectory(
        RecordedCall(None, "m", asked, [answer], is_whole=True),
        RecordedCall(None, "m", [*asked, answer, *results], [_message("assistant", "end")], is_whole=True),
    )
    developer, stray, user, step, _ = document["steps"]
    assert (developer["source"], developer["extra"]) == ("system", {"role": "developer"})
    assert (stray["source"], stray["extra"]) == ("user", {"role": "tool"})
    assert user["extra"] == {"name": "ann"}
    assert [call["tool_call_id"] for call in step["tool_calls"]] == ["call_4_0", "k"]
    assert step["observation"]["results"] == [
        {"source_call_id": "call_4_0", "content": "one", "extra": {"tool_call_id": "z"}},
        {"source_call_id": "k", "content": "two"},
        {"content": "three"},
    ]


def test_calls_that_are_no_steps_are_counted() -> None:
    asked, answer = [_message("user", "q")], [_message("assistant", "a")]
    image = RecordedCall("m", None, asked, answer, is_whole=True, flaw="other_parts")
    other = RecordedCall("x", None, asked, answer, is_whole=True)
    assert _trajectory(image, other, agents=frozenset({"m"})) == (None, {"other_parts": 1, "not_selected": 1})


ASKED_ONLY, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def _recorded(response: str | None, *served: tuple[str, str, int]) -> RecordedCall:
    """A client's call with the spans (name, response, choice) that a policy server recorded below it."""
    stated = {} if response is None else {keys.GEN_AI_RESPONSE_ID: response}
    messages = {
        "gen_ai.input.messages": json.dumps([text("user", "q")]),
        "gen_ai.output.messages": json.dumps([text("assistant", "a")]),
    }
    spans = [MessageSpan("t", "client", None, 0, 9, False, {keys.GEN_AI_OPERATION: "chat", **messages, **stated})]
    for start, (name, served_response, choice) in enumerate(served, start=1):
        about = {keys.CALL_SERVER: "s", keys.GEN_AI_RESPONSE_ID: served_response, keys.CHOICE_INDEX: choice}
        spans.append(MessageSpan("t", name, "client", start, start, False, {keys.GEN_AI_OPERATION: "chat", **about}))
    (call,) = recorded_calls(spans)
    return call


@pytest.mark.parametrize(
    ("response", "stored", "ids"),
    [
        ("r2", {"s1": ("r1", 0), "s2": ("r2", 0)}, [2]),  # a retried request
        ("r2", {"s1": ("r1", 0)}, None),  # the answer's own tokens are not stored
        (None, {"s1": ("r1", 0), "s2": ("r2", 0)}, None),  # nobody knows which response it was
        ("r1", {"s1": ("r1", 0), "s2": ("r1", 1)}, [1]),
        ("r1", {"s2": ("r1", 1)}, None),  # the tokens of another choice
        (None, {"s1": ("r1", 0)}, [1]),
    ],
)
def test_a_step_has_the_tokens_of_its_response_and_choice_or_none(
    response: str | None, stored: dict[str, tuple[str, int]], ids: list[int] | None
) -> None:
    call = _recorded(response, *((name, *about) for name, about in stored.items()))
    tokens = {
        name: SpanTokens([0], [int(name[1:])], [-0.5], of_response, choice)
        for name, (of_response, choice) in stored.items()
    }
    document, skipped = _trajectory(call, agents=frozenset(), **tokens)
    metrics = document["steps"][-1].get("metrics", {})
    assert metrics.get("completion_token_ids") == ids
    assert skipped.get("unmatched_tokens", 0) == (ids is None)


def _read_back(document: Any, folder: Path) -> Seen:
    (folder / "trajectory.jsonl").write_text(json.dumps(document) + "\n")
    (call,) = read(folder / "trajectory.jsonl").calls
    return call


LANGFUSE = {
    "langfuse.observation.type": "generation",
    "langfuse.observation.input": '[{"role": "user", "content": "q"}]',
}
OPEN_INFERENCE = {
    "openinference.span.kind": "LLM",
    **{f"llm.input_messages.0.message.{name}": value for name, value in ASKED_ONLY.items()},
    **{f"llm.output_messages.0.message.{name}": value for name, value in ANSWERED.items()},
}


@pytest.mark.parametrize(
    ("attributes", "reasons"),
    [
        (OPEN_INFERENCE | {"output.value": json.dumps({"choices": [{"finish_reason": "length"}]})}, ["length"]),
        (OPEN_INFERENCE | {"output.value": json.dumps({"choices": [{"finish_reason": "stop"}]})}, ["stop"]),
        (LANGFUSE | {"langfuse.observation.metadata.finish_reason": "content_filter"}, ["content_filter"]),
        (
            LANGFUSE
            | {
                "langfuse.observation.model.parameters": '{"max_tokens": 5}',
                "langfuse.observation.usage_details": '{"output": 5}',
            },
            ["length"],
        ),
        (LANGFUSE, None),
    ],
)
def test_an_answer_that_was_cut_off_is_read_back_as_cut_off(
    attributes: dict[str, Any], reasons: list[str] | None, tmp_path: Path
) -> None:
    if attributes.keys() & LANGFUSE.keys():
        attributes = attributes | {"langfuse.observation.output": json.dumps(ANSWERED)}
    (call,) = recorded_calls([MessageSpan("t", "s", None, 0, 1, False, attributes)])
    document, _ = _trajectory(call)
    assert document["steps"][-1].get("extra", {}) == ({keys.GEN_AI_FINISH_REASONS: reasons} if reasons else {})
    again = _read_back(document, tmp_path)
    assert again.attributes.get(keys.GEN_AI_FINISH_REASONS) == reasons
    assert text_flaw(again.attributes, failed=False) == (None if call.is_whole else "cut_off")
    assert call.is_whole == (reasons in (None, ["stop"]))


def test_numbers_that_are_none_are_left_out_and_counted() -> None:
    facts = {
        "gen_ai.usage.input_tokens": True,
        "gen_ai.usage.cost": math.nan,
        "gen_ai.request.temperature": math.inf,
        "gen_ai.request.top_p": 0.5,
    }
    answer = _message("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": {"x": math.nan}}}])
    record = CallRecord(0, 1, (("t", "s"),), facts)
    call = RecordedCall("m", None, [ASKED_ONLY], [answer], is_whole=True, record=record)
    document, skipped = _trajectory(call, s=SpanTokens([1], [2], [-math.inf], None, 0))
    step = document["steps"][-1]
    assert step["metrics"] == {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "prompt_token_ids": [1],
        "completion_token_ids": [2],
    }
    assert step["extra"] == {"gen_ai.request.top_p": 0.5}
    assert step["tool_calls"][0]["extra"] == {"arguments": '{"x": NaN}'}
    assert skipped == {"invalid_logprobs": 1, "invalid_numbers": 3}
    json.dumps(document, allow_nan=False)
    without, _ = _trajectory(call)
    assert "metrics" not in without["steps"][-1]


def test_a_call_continues_the_longest_conversation_that_it_repeats_as_a_dataset_does() -> None:
    turns = [_message(role, str(number)) for number, role in enumerate(("user", "assistant") * 3)]
    calls = [RecordedCall("m", None, turns[:n], [turns[n]], is_whole=True) for n in (1, 3, 1, 5)]
    document, _ = _trajectory(*calls)
    assert [step["message"] for step in document["steps"]] == list("012345")
    assert not any("is_copied_context" in step for step in document["steps"])
    (retried,) = document["subagent_trajectories"]
    assert [step["message"] for step in retried["steps"]] == ["0", "1"]


def test_two_tool_calls_of_one_id_have_a_result_each() -> None:
    function = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer = _message("assistant", "", tool_calls=[function, function])
    results = [_message("tool", output, tool_call_id="x") for output in ("one", "two")]
    prompt = [ASKED_ONLY, answer, *results]
    document, _ = _trajectory(RecordedCall("m", None, prompt, [_message("assistant", "end")], is_whole=True))
    assert document["steps"][1]["observation"]["results"] == [
        {"source_call_id": "x", "content": "one"},
        {"source_call_id": "x", "content": "two"},
    ]


@pytest.mark.ci
def test_a_rollout_of_several_datasets_is_one_trajectory_with_its_newest_reward(bench: Bench, tmp_path: Path) -> None:
    def rollout(name: str, task: str, reward: float | None) -> TestRollout:
        spans = bench.rollout(name, task=task)
        client = _client(spans, "a", 1.0, [ASKED], text("assistant", name))
        spans.call(0, [1, 2], [3, 4], at=1.1, parent=client)
        return spans if reward is None else spans.reward(reward)

    bench.send(rollout("a", "t0", 0.0), rollout("b", "t0", 1.0), rollout("c", "t1", None), rollout("d", "t1", 1.0))
    bench.build()
    late = bench.rollout("c", task="t1")
    late.log_reward(0.25, at=120.0)
    bench.send(late, rollout("e", "t2", 1.0), rollout("f", "t2", 0.0))
    bench.build()
    seen = [
        [line["rollout_id"][-1] for line in open_published(bench.out / name).seen().iter_rows(named=True)]
        for name in ("round-0000", "round-0001")
    ]
    assert seen[0] == list("abcd")
    assert set("cef") <= set(seen[1])
    out = tmp_path / "trajectories.jsonl"
    assert run(["export", "atif", str(bench.out), str(out)]) == 0
    rewards = [
        (line["extra"]["rollout_id"][-1], line["extra"].get("reward"))
        for line in map(json.loads, out.read_text().splitlines())
    ]
    assert rewards == [("a", 0.0), ("b", 1.0), ("c", 0.25), ("d", 1.0), ("e", 1.0), ("f", 0.0)]


@pytest.mark.ci
def test_rollouts_with_many_tokens_are_read_a_few_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{bench.run_id}-{name}" for name in "abc"]
    bench.send(*(_rollout(bench.rollout(name)) for name in "abc"))
    known = [ROLLOUT | {"rollout_id": name, "task_id": "t0", "reason": None} for name in names]
    rollouts = pl.DataFrame(known, schema_overrides={"reason": pl.String})
    reads: list[Any] = []
    with Source([str(bench.collectors[0].store)], allow_behind=True) as source:
        whole = list(trajectories(source, rollouts, frozenset(), Examples()))
        monkeypatch.setattr("trainspan_processing.read.tokens.TOKENS_PER_CHUNK", 32)  # each has 16 tokens
        read_rows = Source.read

        def read_and_note(self: Source, name: str, selection: Selection, *rest: Any, **more: Any) -> Any:
            reads.append((name, selection.rollout_ids))
            return read_rows(self, name, selection, *rest, **more)

        monkeypatch.setattr(Source, "read", read_and_note)
        assert list(trajectories(source, rollouts, frozenset(), Examples())) == whole
    assert [document["extra"]["rollout_id"] for document in whole] == names
    assert [ids for name, ids in reads if name == "calls"] == [names[:2], names[2:]]


@pytest.mark.slow
@pytest.mark.network
def test_harbors_validator_accepts_the_file(exported: Path, foreign: Callable[[str], str]) -> None:
    program = (
        "import sys; from harbor.utils.trajectory_validator import TrajectoryValidator\n"
        f"lines = open({str(exported)!r}).read().splitlines()\n"
        "validator = TrajectoryValidator()\n"
        "print([(validator.validate(line), validator.get_errors()) for line in lines])\n"
    )
    assert foreign(program) == "[(True, [])]\n"
