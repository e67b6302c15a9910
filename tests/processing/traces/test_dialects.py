"""Calls from our own capture and from recordings by real instrumentations, alone and together."""

import json
from typing import Any

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.recordings import DIALECTS, FOLDER, Recording
from tests.processing.support.traces import chain
from trainspan_processing.read import inventory
from trainspan_processing.read.source import Source
from trainspan_processing.stored_rollout import StoredRollout
from trainspan_processing.text.chat_messages import chat_messages
from trainspan_processing.text.dialects import messages_of
from trainspan_processing.traces.rollout_reader import stored_rollouts
from trainspan_schemas.errors import DatasetError
from trainspan_schemas.telemetry import keys

_TOKENS = [[1, 2], [11, 2], [21, 2], [31, 2], [32, 2]]
"""Completions of the recorded agent: a tool call, an answer to the tool's result, a stream, two choices."""


def _recording(bench: Bench, name: str, **more: str) -> Recording:
    return Recording(f"{bench.run_id}-{name}", run=bench.run_id, **more)


def _stored(bench: Bench) -> StoredRollout:
    traces = bench.traces()
    with Source([str(bench.collectors[0].store)]) as source:
        ((_, stored),) = stored_rollouts(source, traces, traces.rollouts)
    return stored


@pytest.mark.ci
@pytest.mark.parametrize("dialect", DIALECTS)
def test_with_our_capture_each_call_counts_once_with_its_text_whatever_recorded_it_too(
    bench: Bench, dialect: str
) -> None:
    bench.send(_recording(bench, "a").replay(dialect).serve().reward(1.0))
    calls = _stored(bench).calls
    assert [call.text for call in calls] == ["", "answer 1.0", "answer 2.0", "answer 3.0", "answer 3.1"]
    assert [message["role"] for message in calls[1].messages] == ["system", "user", "assistant", "tool"]
    assert calls[2].messages[0] == {"role": "system", "content": "You are a calculator."}
    assert calls[2].messages[1]["content"] == "stream"
    built = bench.build(round_=0, baseline="none")
    table = rows(built)
    assert table["completion_ids"].to_list() == _TOKENS
    assert table["tokens_source"].unique().to_list() == ["engine"]
    assert (built.manifest["calls_seen"], built.manifest["dropped"]) == (5, {})


def test_system_instructions_come_first_and_each_tool_result_is_a_message_of_the_tool() -> None:
    """Pydantic AI records instructions apart from the messages, and a tool's result as a part of a user's message."""
    first, second = json.loads((FOLDER / "pydantic_ai.json").read_text())["spans"]
    system, question = {"role": "system", "content": "You are a calculator."}, {"role": "user", "content": "1 + 2?"}
    assert chat_messages(messages_of(first["attributes"])[0]) == [system, question]
    asked, answered = messages_of(second["attributes"])
    call = {
        "id": "pyd_ai_tool_call_id__add",
        "type": "function",
        "function": {"name": "add", "arguments": {"x": 0, "y": 0}},
    }
    assert chat_messages(asked) == [
        system,
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "0", "name": "add", "tool_call_id": call["id"]},
    ]
    assert answered == [{"role": "assistant", "content": '{"add":0}'}]


def test_a_message_with_tool_results_and_text_is_one_message_of_the_tool_for_each_and_then_the_users() -> None:
    parts = [
        {"type": "tool_call_response", "id": "1", "response": "a"},
        {"type": "tool_call_response", "id": "2", "response": {"b": 1}},
        {"type": "text", "content": "go on"},
    ]
    attributes = {"gen_ai.input.messages": json.dumps([{"role": "user", "parts": parts}])}
    assert messages_of(attributes)[0] == [
        {"role": "tool", "content": "a", "tool_call_id": "1"},
        {"role": "tool", "content": '{"b": 1}', "tool_call_id": "2"},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.ci
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_reward_on_the_clients_span_of_a_call_or_after_its_tool_is_that_calls(bench: Bench, dialect: str) -> None:
    rollout = _recording(bench, "a").replay(dialect).serve()
    survey_of = {
        "official": 0,
        "official_event": 0,
        "official_messages": 0,
        "traceloop": 0,
        "traceloop_flat": 0,
        "openinference": 0,
        "mixed": 1,
    }
    golden = json.loads((FOLDER / f"{dialect}.json").read_text())["spans"]
    client = rollout.spans[1 + survey_of[dialect]].proto().scope_spans[0].spans[0].span_id.hex()
    tool = next(number for number, span in enumerate(golden) if span["name"] == "execute_tool add")
    tool_id = rollout.spans[1 + tool].proto().scope_spans[0].spans[0].span_id.hex()
    rollout.log_reward(0.25, span_id=client, at=50.0).log_reward(0.5, span_id=tool_id, at=50.0)
    bench.send(rollout)
    assert [edge[1:] for edge in bench.edges()] == [("client_call", 0, 0.25), ("step", 0, 0.5)]


@pytest.mark.parametrize("dialect", ["official", "official_event", "official_messages", "traceloop", "traceloop_flat"])
def test_without_any_capture_each_call_is_counted_once_and_named(bench: Bench, dialect: str) -> None:
    bench.send(_recording(bench, "a").replay(dialect).reward(1.0))
    with pytest.raises(
        DatasetError, match=r"none of 4 calls .* most excluded by no_token_ids \(4\): .*trainspan serve"
    ):
        bench.build(round_=0)


def test_a_call_of_a_model_that_is_not_ours_is_not_selected(bench: Bench) -> None:
    rollout = chain(bench.rollout("a"), 2).reward(1.0)
    vendor = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "vendor-model"}
    outer = rollout.span("vendor", 1.0, 2.0, **vendor)
    rollout.span("same", 1.1, 1.9, parent=outer, **{"openinference.span.kind": "LLM", "llm.model_name": "vendor-model"})
    bench.send(rollout)
    built = bench.build(round_=0, baseline="none")
    assert (built.manifest["dropped"], built.manifest["calls_kept"]) == ({"not_selected": 1}, 2)
    assert built.manifest["coverage"] == 1.0
    assert built.manifest["dropped_without_tokens"] == {"not_selected": 1}


def test_a_call_that_the_policy_server_recorded_without_tokens_is_counted(bench: Bench) -> None:
    for name, more in (("a", {}), ("b", {"trainspan.redacted": ["trainspan.prompt.token_ids"]})):
        rollout = chain(bench.rollout(name, stated_calls=2), 1).reward(1.0)
        client = rollout.span("client", 5.0, 6.0, **{"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy"})
        without: dict[str, Any] = dict.fromkeys(
            ("trainspan.prompt.token_ids", "trainspan.completion.token_ids", "trainspan.completion.logprobs")
        )
        rollout.call(1, [9], [9], at=5.1, parent=client, **without, **more)
        bench.send(rollout)
    built = bench.build(round_=0, baseline="none")
    assert built.manifest["dropped"] == {"no_token_ids": 1, "redacted": 1}
    assert built.manifest["dropped_without_tokens"] == built.manifest["dropped"]
    assert built.manifest["calls_kept"] == 2


def test_the_failed_call_of_a_client_is_no_call(bench: Bench) -> None:
    bench.send(_recording(bench, "a").replay("official"))
    assert bench.traces().others.height == 4


@pytest.mark.parametrize("dialect", ["openinference", "mixed"])
def test_a_response_that_a_client_kept_whole_is_trained_like_a_call_of_our_own(bench: Bench, dialect: str) -> None:
    bench.send(_recording(bench, "a").replay(dialect).reward(1.0))
    admitted = {"baseline": "none", "admit": "unstated_sampling"}  # the recorded requests set only a temperature
    built = bench.build(round_=0, **admitted)
    table = rows(built)
    assert built.manifest["dropped"] == {}
    assert table["completion_ids"].to_list() == _TOKENS
    assert table["tokens_source"].unique().to_list() == ["response"]
    assert table["prompt_ids"].to_list()[0] == [100, 101, 102, 103]
    assert table["logprobs"].to_list()[-1] == [-1.5, -1.5]
    assert table["policy_name"].unique().to_list() == ["policy"]
    whole = _recording(bench, "b").replay(dialect).serve().reward(1.0)
    bench.send(whole)
    both = rows(bench.build(round_=0, **admitted, out=bench.out / "both"))
    ours, theirs = (
        both.filter(pl.col("rollout_id").str.ends_with(name)).select("prompt_ids", "completion_ids", "logprobs").rows()
        for name in "ba"
    )
    assert theirs == ours


def test_dialects_mixed_in_one_trace_count_each_call_once(bench: Bench) -> None:
    """Two instrumentations in one process nest; recordings of others are next to them in the same trace."""
    rollout = _recording(bench, "a").replay("mixed").serve().reward(1.0)
    rollout.replay("traceloop_flat")  # the same requests, as a third instrumentation saw them: by response id
    bench.send(rollout)
    built = bench.build(round_=0, baseline="none")
    assert (built.manifest["calls_seen"], built.manifest["calls_kept"]) == (5, 5)


def test_an_unnamed_agent_is_known_by_its_system_prompt(bench: Bench) -> None:
    bench.send(_recording(bench, "a").replay("traceloop").serve())
    (agent,) = bench.traces().calls["agent"].unique().to_list()
    assert agent.startswith("prompt:")
    other = _recording(bench, "b").replay("traceloop_flat").serve()
    bench.send(other)
    assert bench.traces().calls["agent"].unique().to_list() == [agent]


_NAMED = {
    "genai": {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"},
    "traceloop": {"traceloop.span.kind": "agent", "traceloop.entity.name": "planner"},
    "openinference": {"openinference.span.kind": "AGENT", "graph.node.id": "planner"},
    "openai-agents": {"openinference.span.kind": "AGENT", "agent.name": "planner"},
    "langgraph": {"openinference.span.kind": "AGENT", "metadata": '{"x": 1, "langgraph_node": "planner"}'},
    "traceloop-langgraph": {
        "traceloop.span.kind": "agent",
        "traceloop.association.properties.langgraph_node": "planner",
    },
}


def test_the_nearest_ancestor_names_the_agent(bench: Bench) -> None:
    rollouts = []
    for framework, named in _NAMED.items():
        rollout = bench.rollout(framework)
        outer = rollout.span(
            "outer", 0.1, 9.0, **{"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "outer"}
        )
        inner = rollout.span("inner", 0.2, 8.0, parent=outer, **named)
        rollout.call(0, [1], [2], parent=rollout.span("task", 0.3, 7.0, parent=inner))
        rollout.call(1, [1], [3], parent=outer)
        rollout.call(2, [1], [4], parent=inner, agent="own")
        rollout.call(3, [1], [5], parent=inner, agent="agent-0123abcd")  # what the policy server made of the prompt
        rollout.call(4, [1], [6], agent="agent-0123abcd")
        rollouts.append(rollout)
    bench.send(*rollouts)
    agents = bench.traces().calls.sort("call_index").group_by("rollout_id").agg("agent").rows()
    assert dict(agents) == {
        rollout.rollout_id: ["planner", "outer", "own", "planner", "agent-0123abcd"] for rollout in rollouts
    }


def test_a_tool_step_is_found_in_every_dialect_with_its_status(bench: Bench) -> None:
    rollout = bench.rollout("a")
    kinds = (
        {"gen_ai.operation.name": "execute_tool"},
        {"traceloop.span.kind": "tool"},
        {"openinference.span.kind": "TOOL"},
    )
    for number, kind in enumerate(kinds):
        rollout.span(f"tool{number}", 1.0 + number, 2.0 + number, **kind, **{"error.type": "ValueError"})
        rollout.spans[-1].failed = number == 1
    rollout.span("other", 9.0, 9.5)
    bench.send(rollout)
    tools = bench.traces().spans.filter("is_tool").sort("start_ns")
    assert tools.select("failed", "error_type").rows() == [(False, None), (True, "ValueError"), (False, None)]


@pytest.mark.parametrize("around", ["span", "generation", "agent"])
def test_an_observation_of_langfuse_around_calls_does_not_change_their_credit(bench: Bench, around: str) -> None:
    more = {"langfuse__observation__type": around, "langfuse__observation__model__name": "m"}
    rollout = bench.rollout("a")
    solve = rollout.span("solve", 0.5, 20.0, **more)
    inner = rollout.span("answer", 0.6, 19.0, parent=solve, **more)
    rollout.call(0, [1, 2], [3, 4], at=1.0, parent=inner, logprobs=[-0.5, -0.5])
    tool = rollout.span("tool", 3.0, 3.5, parent=inner)
    rollout.call(1, [9, 2], [5], at=5.0, parent=inner, logprobs=[-0.5])
    rollout.log_reward(0.5, span_id=tool, at=3.4).log_reward(1.0, at=99.0)
    bench.send(rollout)
    assert [edge[1:] for edge in bench.edges()] == [("rollout", None, 1.0), ("step", 0, 0.5)]


@pytest.mark.parametrize("around", ["span", "generation"])
def test_a_generation_without_a_rollout_around_those_of_several_chunks_is_no_call_in_any(
    bench: Bench, around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "spans_per_chunk", lambda spans: 1)
    rollouts = [bench.rollout(name) for name in "abc"]
    for number, rollout in enumerate(rollouts):
        rollout.call(0, [1, 2], [3, 4], at=1.0, logprobs=[-0.5, -0.5])
        rollout.reward(float(number))
    outer = rollouts[0].span("all", 0.0, 50.0, langfuse__observation__type=around)
    trace_id = rollouts[0].trace_id
    generation = rollouts[0].spans[-1]
    generation.parent = None
    del generation.attributes[keys.ROLLOUT_ID]
    for rollout in rollouts[:2]:
        for span in rollout.spans:
            span.trace_id = trace_id
            span.parent = outer if span.span_id == rollout.root else span.parent
    bench.send(*rollouts)
    manifest = bench.build().manifest
    assert (manifest["rows"], manifest["dropped"]) == (3, {})
