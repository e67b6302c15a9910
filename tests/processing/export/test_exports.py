"""`trainspan export`: chat messages of every dialect, the best of a group, pairs at the point of divergence."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.recordings import FOLDER
from tests.processing.support.traces import TestRollout, chain
from tests.support.models.byte_tokenizer import encode, make_byte_tokenizer
from trainspan_processing.export.candidates import RewardedRollout
from trainspan_processing.export.conversations import MessageSpan, RecordedCall, recorded_calls
from trainspan_processing.export.dpo import preference_pairs
from trainspan_processing.export.sft import supervised_examples
from trainspan_processing.text.chat_messages import chat_messages, same_messages, tools_of
from trainspan_schemas.errors import DatasetError

pytestmark = pytest.mark.ci

TOOL_CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("message", "chat"),
    [
        (
            {
                "role": "assistant",
                "content": "let me",
                "parts": [{"type": "tool_call", "name": "add", "arguments": {"x": 1}}],
            },
            [{"role": "assistant", "content": "let me", "tool_calls": [TOOL_CALL]}],
        ),
        (
            {
                "role": "assistant",
                "tool_calls.0.name": "add",
                "tool_calls.0.arguments": '{"x": 1}',
                "tool_calls.0.id": "c1",
            },
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **TOOL_CALL}]}],
        ),
        (
            {
                "role": "assistant",
                "tool_calls.0.tool_call.function.name": "add",
                "tool_calls.0.tool_call.function.arguments": '{"x": 1}',
            },
            [{"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}],
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"x": 1}'}}],
            },
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **TOOL_CALL}]}],
        ),
        (
            {"role": "assistant", "content": "4", "parts": [{"type": "reasoning", "content": "2+2"}]},
            [{"role": "assistant", "content": "4", "reasoning_content": "2+2"}],
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}],
            },
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            {"role": "tool", "content": "5", "tool_call_id": "c"},
            [{"role": "tool", "content": "5", "tool_call_id": "c"}],
        ),
    ],
)
def test_every_dialect_becomes_the_same_chat_message(message: dict[str, Any], chat: list[dict[str, Any]]) -> None:
    assert chat_messages([message]) == chat


def test_arguments_that_are_no_object_stay_as_they_were_written() -> None:
    (made,) = chat_messages([{"role": "assistant", "tool_calls.0.name": "f", "tool_calls.0.arguments": '{"x": '}])
    assert made["tool_calls"][0]["function"]["arguments"] == '{"x": '


def test_ids_of_tool_calls_do_not_make_a_conversation_another() -> None:
    one, two = ([{"role": "tool", "content": "2", "tool_call_id": name}] for name in ("a", "b"))
    assert same_messages(one) == same_messages(two)
    assert same_messages(one) != same_messages([{"role": "tool", "content": "3", "tool_call_id": "a"}])


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.tool.definitions": '[{"type": "function", "name": "add", "parameters": {"type": "object"}}]'},
        {
            "llm.tools.0.tool.json_schema": '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
        },
        {"llm.request.functions.0.name": "add", "llm.request.functions.0.parameters": '{"type": "object"}'},
    ],
)
def test_offered_tools_are_json_schemas(attributes: dict[str, Any]) -> None:
    assert tools_of(attributes) == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def _chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    def said(role: str, text: str) -> str:
        return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])

    plain = {key.replace("__", "."): value for key, value in more.items()}
    messages = {"gen_ai.input.messages": said("user", question), "gen_ai.output.messages": said("assistant", answer)}
    return {"gen_ai.operation.name": "chat", **messages, **plain}


def _span(
    name: str, attributes: dict[str, Any], *, parent: str | None = None, start: int = 0, failed: bool = False
) -> MessageSpan:
    return MessageSpan("t", name, parent, start, start + 1, failed, attributes)


def test_one_call_in_two_dialects_is_said_once_by_the_one_that_says_more() -> None:
    flat = {"llm.request.type": "chat", "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "2+2?"}
    flat |= {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "4"}
    spans = [
        _span("outer", flat),
        _span("between", {}, parent="outer"),
        _span("inner", _chat("2+2?", "4"), parent="between"),
    ]
    (call,) = recorded_calls(spans)
    assert (call.prompt, call.answer) == (
        [{"role": "user", "content": "2+2?"}],
        [{"role": "assistant", "content": "4"}],
    )


def test_recordings_that_share_a_call_are_one_though_only_the_inner_one_knows_the_response() -> None:
    inner = _chat("2+2?", "4", gen_ai__response__id="chatcmpl-1")
    tools = {"gen_ai.tool.definitions": '[{"type": "function", "name": "add"}]', "llm.request.type": "chat"}
    (call,) = recorded_calls([_span("inner", inner, parent="outer"), _span("outer", tools)])
    assert call.answer == [{"role": "assistant", "content": "4"}]
    assert call.tools == ('{"type": "function", "function": {"name": "add"}}',)


def test_a_tool_keeps_the_order_of_its_keys_which_chat_templates_render() -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {"y": {}, "x": {}}, "required": ["y"]}}
    tool = {"type": "function", "function": function}
    (call,) = recorded_calls([_span("a", _chat("2+2?", "4", gen_ai__tool__definitions=json.dumps([tool])))])
    assert call.tools == (json.dumps(tool),)


def test_the_tools_are_those_that_the_policy_server_rendered() -> None:
    recorded = {"type": "function", "name": "add", "parameters": {}}
    rendered = {"type": "function", "function": {"name": "add", "description": None, "parameters": {}, "strict": True}}
    server = {"trainspan.call.server": "ab" * 16, "gen_ai.operation.name": "chat"}
    client = _chat("2+2?", "4", gen_ai__tool__definitions=json.dumps([recorded]))
    spans = [
        _span("client", client),
        _span("server", {**server, "gen_ai.tool.definitions": json.dumps([rendered])}, parent="client"),
    ]
    assert [call.tools for order in (spans, spans[::-1]) for call in recorded_calls(order)] == [
        (json.dumps(rendered),)
    ] * 2
    (without,) = recorded_calls([spans[0], _span("server", server, parent="client")])
    assert len(without.tools) == 1


@pytest.mark.parametrize("dialect", ["official", "traceloop", "traceloop_flat", "openinference", "mixed"])
def test_every_real_instrumentation_tells_the_same_conversation(dialect: str) -> None:
    """All recordings are of the same agent: a tool call, its result, a stream, two choices, an error."""
    calls = recorded_calls(_recorded(dialect))
    system = {"role": "system", "content": "You are a calculator."}
    asked = {"role": "user", "content": "tool: 2+2?"}
    function = {"name": "add", "arguments": {"a": 2, "b": 2}}
    tool_call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "content": "4", "tool_call_id": "call_1"}
    assert [(call.prompt, call.answer) for call in calls] == [
        ([system, asked], [tool_call]),
        ([system, asked, tool_call, result], [{"role": "assistant", "content": "answer 1.0"}]),
        ([system, {"role": "user", "content": "stream"}], [{"role": "assistant", "content": "answer 2.0"}]),
        ([system, {"role": "user", "content": "two"}], [{"role": "assistant", "content": "answer 3.0"}]),
    ]
    assert all(call.is_whole and call.model == "policy" for call in calls)
    if dialect != "official":  # it does not record the offered tools
        assert json.loads(calls[0].tools[0])["function"]["name"] == "add"


def _recorded(dialect: str) -> list[MessageSpan]:
    def value(typed: dict[str, Any]) -> Any:
        ((kind, content),) = typed.items()
        if kind == "arrayValue":
            return [value(item) for item in content.get("values", [])]
        return int(content) if kind == "intValue" else content

    path = FOLDER / f"{dialect}.json"
    found = []
    for span in json.loads(path.read_text())["spans"]:
        attributes = {item["key"]: value(item["value"]) for item in span.get("attributes", [])}
        failed = span.get("status", {}).get("code") == "STATUS_CODE_ERROR"
        start_ns, end_ns = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        ids = span["traceId"], span["spanId"], span.get("parentSpanId")
        found.append(MessageSpan(*ids, start_ns, end_ns, failed, attributes))
    return found


def test_calls_are_in_order_and_failed_or_silent_ones_left_out() -> None:
    spans = [
        _span("c", _chat("second", "2"), start=20),
        _span("a", _chat("first", "1"), start=10),
        _span("f", _chat("failed", "x"), start=12, failed=True),
        _span("s", {"gen_ai.operation.name": "chat"}, start=13),
        _span("agent", {**_chat("whole", "run"), "gen_ai.operation.name": "invoke_agent"}, start=5),
    ]
    assert [call.answer[0]["content"] for call in recorded_calls(spans)] == ["1", "2"]  # type: ignore[index]


def test_an_answer_that_was_cut_off_is_known() -> None:
    cut, whole = (
        recorded_calls([_span("a", _chat("q", "a", gen_ai__response__finish_reasons=[why]))])[0]
        for why in ("length", "stop")
    )
    assert (cut.is_whole, whole.is_whole) == (False, True)


def _said(*exchanges: tuple[str, str], agent: str | None = None) -> list[RecordedCall]:
    return [
        RecordedCall(
            agent, "m", [{"role": "user", "content": ask}], [{"role": "assistant", "content": answer}], is_whole=True
        )
        for ask, answer in exchanges
    ]


def _candidates(**rewards: float) -> dict[str, Sequence[RewardedRollout]]:
    return {"g": [RewardedRollout(name, 0, "g", reward) for name, reward in rewards.items()]}


def test_the_best_rollout_gives_its_calls_and_of_equals_the_shortest() -> None:
    said = {"a": _said(("q", "1"), ("r", "2")), "b": _said(("q", "3")), "c": _said(("q", "4"))}
    made = supervised_examples(
        _candidates(a=1.0, b=1.0, c=0.0), lambda key: said[key[0]], min_reward=None, agents=frozenset()
    )
    assert [row["completion"][0]["content"] for row in made.rows] == ["3"]
    assert made.sources == [{"rollout_id": "b", "attempt": 0, "reward": 1.0}]


@pytest.mark.parametrize(("least", "answers"), [(None, ["3", "1", "2"]), (0.5, ["3", "5", "1", "2"])])
def test_all_rollouts_that_are_good_enough_give_their_calls_if_asked(least: float | None, answers: list[str]) -> None:
    said = {"a": _said(("q", "1"), ("r", "2")), "b": _said(("q", "3")), "c": _said(("q", "4")), "d": _said(("q", "5"))}
    made = supervised_examples(
        _candidates(a=1.0, b=1.0, c=0.0, d=0.5),
        lambda key: said[key[0]],
        min_reward=least,
        agents=frozenset(),
        take_all=True,
    )
    assert [row["completion"][0]["content"] for row in made.rows] == answers, "the shortest first"
    assert [source["rollout_id"] for source in made.sources].count("a") == 2
    assert made.groups_used == 1


def test_groups_whose_best_is_bad_are_left_out() -> None:
    made = supervised_examples(_candidates(a=0.5), lambda key: _said(("q", "1")), min_reward=1.0, agents=frozenset())
    assert (made.rows, dict(made.skipped)) == ([], {"below_min_reward": 1})


def test_only_the_asked_agents_calls_and_whole_answers_are_taken() -> None:
    cut = RecordedCall("planner", "m", "p", "q", is_whole=False)
    said = [*_said(("q", "1"), agent="planner"), *_said(("q", "2"), agent="coder"), cut]
    made = supervised_examples(_candidates(a=1.0), lambda key: said, min_reward=None, agents=frozenset({"planner"}))
    assert [row["completion"][0]["content"] for row in made.rows] == ["1"]
    assert dict(made.skipped) == {"not_selected": 1, "cut_off": 1}


def test_a_pair_starts_where_best_and_worst_differ() -> None:
    said = {
        "a": _said(("q", "same"), ("q2", "good")),
        "b": _said(("q", "same"), ("q2", "bad"), ("q3", "end")),
        "c": _said(("q", "x")),
    }
    made = preference_pairs(
        _candidates(a=1.0, b=0.0, c=0.5), lambda key: said[key[0]], min_reward=None, agents=frozenset()
    )
    (row,) = made.rows
    assert row["prompt"] == [{"role": "user", "content": "q2"}]
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("good", "bad")
    assert (made.sources[0]["chosen"]["rollout_id"], made.sources[0]["rejected"]["rollout_id"]) == ("a", "b")


@pytest.mark.parametrize(
    ("rewards", "said", "reason"),
    [
        ({"a": 1.0}, {}, "one_rollout"),
        ({"a": 1.0, "b": 1.0}, {}, "equal_rewards"),
        ({"a": 1.0, "b": 0.0}, {"a": [], "b": _said(("q", "1"))}, "no_text"),
        ({"a": 1.0, "b": 0.0}, {"a": _said(("p", "1")), "b": _said(("q", "1"))}, "no_common_prompt"),
        ({"a": 1.0, "b": 0.0}, {"a": _said(("q", "1")), "b": _said(("q", "1"))}, "same_answers"),
    ],
)
def test_a_group_without_a_pair_is_counted_with_its_reason(
    rewards: dict[str, float], said: dict[str, Any], reason: str
) -> None:
    made = preference_pairs(_candidates(**rewards), lambda key: said[key[0]], min_reward=None, agents=frozenset())
    assert (made.rows, dict(made.skipped)) == ([], {reason: 1})


def _vendor(rollout: TestRollout, answer: str, reward: float, **attributes: object) -> TestRollout:
    """A rollout with a single, vendor call, which only the client's span records."""
    attributes |= {key.replace(".", "__"): value for key, value in _chat("2+2?", answer).items()}
    rollout.span("client", 1.0, 2.0, **attributes)
    return rollout.reward(reward)


def _export(bench: Bench, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trainspan_cli", "export", *map(str, arguments)]
    environ = {**os.environ, "TRAINSPAN_HOME": str(bench.out / "home")}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_vendors_answers_are_exported_from_the_store(bench: Bench, tmp_path: Path) -> None:
    # Of a span whose attempt is no number the trace says whose it is.
    bench.send(_vendor(bench.rollout("a"), "4", 1.0, trainspan__attempt="?"), _vendor(bench.rollout("b"), "5", 0.0))
    # Branches repeat answers of other rollouts: they are no examples, of a group of their own or any other.
    bench.send(
        _vendor(bench.rollout("c", task="t0@a.0@1"), "6", 1.0), _vendor(bench.rollout("d", task="t0@a.0@1"), "7", 0.0)
    )
    store, out = bench.collectors[0].store, tmp_path / "sft.jsonl"
    done = _export(bench, "sft", store, out, "--run", bench.run_id)
    assert done.returncode == 0, done.stderr
    user, assistant = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    assert _lines(out) == [{"prompt": [user], "completion": [assistant]}]
    pairs = tmp_path / "dpo.jsonl"
    assert _export(bench, "dpo", store, pairs, "--run", bench.run_id).returncode == 0
    assert _lines(pairs) == [
        {"prompt": [user], "chosen": [assistant], "rejected": [{"role": "assistant", "content": "5"}]}
    ]
    manifest = json.loads((tmp_path / "dpo.jsonl.manifest.json").read_text())
    assert (manifest["examples"], manifest["sources"][0]["chosen"]["reward"]) == (1, 1.0)
    again = _export(bench, "sft", store, out, "--run", bench.run_id)
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)


def test_rollouts_without_recorded_messages_say_what_to_install(bench: Bench, tmp_path: Path) -> None:
    bench.send(*(bench.rollout(name, stated_calls=1).reward(float(name == "a")) for name in "ab"))
    store = bench.collectors[0].store
    for kind in ("sft", "dpo"):
        done = _export(bench, kind, store, tmp_path / "out.jsonl", "--run", bench.run_id)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert "install trainspan[messages] in the agent's environment" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(DatasetError, match=r"no call was recorded of the 2 rollouts in run .*trainspan\[messages\]"):
        bench.build()


def test_the_rows_of_a_dataset_are_decoded_exactly(bench: Bench, tmp_path: Path) -> None:
    model = make_byte_tokenizer(tmp_path)
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name)
        rollout.call(0, encode(model, "<|im_start|>q"), encode(model, f"{name}<|im_end|>"))
        bench.send(rollout.reward(reward))
    built = bench.build()
    silent = _export(bench, "sft", built.path, tmp_path / "chat.jsonl")
    assert silent.returncode == 1
    assert "no client instrumentation recorded the messages" in silent.stderr
    out = tmp_path / "text.jsonl"
    done = _export(bench, "sft", built.path, out, "--form", "text", "--model", model, "--format", "json")
    assert json.loads(done.stdout)["examples"] == 1
    assert _lines(out) == [{"prompt": "<|im_start|>q", "completion": "a<|im_end|>"}]
    assert _export(bench, "dpo", built.path, tmp_path / "d.jsonl", "--form", "text", "--model", model).returncode == 0
    assert _lines(tmp_path / "d.jsonl") == [
        {"prompt": "<|im_start|>q", "chosen": "a<|im_end|>", "rejected": "b<|im_end|>"}
    ]


def test_the_datasets_of_a_run_are_exported_together_without_groups_below_the_least_reward(
    bench: Bench, tmp_path: Path
) -> None:
    model = make_byte_tokenizer(tmp_path)
    for round_, rewards in ((1, (1.0, 0.0)), (2, (0.5, 0.0)), (3, (0.0, 1.0))):
        for name, reward in zip("ab", rewards, strict=True):
            rollout = bench.rollout(f"{name}{round_}", task=f"t{round_}")
            rollout.call(0, encode(model, "q"), encode(model, f"{name}{round_}"))
            bench.send(rollout.reward(reward))
        built = bench.build()
    out = tmp_path / "text.jsonl"
    command = ["sft", built.path.parent, out, "--form", "text", "--model", model, "--min-reward", "1"]
    done = _export(bench, *command, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert [line["completion"] for line in _lines(out)] == ["a1", "b3"]
    assert json.loads(done.stdout)["skipped"] == {"below_min_reward": 1}
    manifest = json.loads((tmp_path / "text.jsonl.manifest.json").read_text())
    assert [Path(path).name for path in manifest["source"]["datasets"]] == ["round-0000", "round-0001", "round-0002"]


def test_an_answer_whose_text_has_other_tokens_is_left_out_and_counted(bench: Bench, tmp_path: Path) -> None:
    """It ends within a character of two bytes, which decodes to the replacement character."""
    model = make_byte_tokenizer(tmp_path)
    rollout = bench.rollout("a")
    rollout.call(0, encode(model, "q"), encode(model, "yes"))
    rollout.call(1, encode(model, "r"), encode(model, "\u00e9")[:1])
    bench.send(rollout.reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    out = tmp_path / "text.jsonl"
    done = _export(bench, "sft", bench.build().path, out, "--form", "text", "--model", model, "--format", "json")
    assert _lines(out) == [{"prompt": "q", "completion": "yes"}]
    assert json.loads(done.stdout)["skipped"] == {"other_tokens": 1}
