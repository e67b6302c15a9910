"""Outcomes of tools from spans, log records and requests, joined with the call whose answer asked for them."""

from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import START_NS, TestRollout
from trainspan_processing.read.tool_uses import read_tool_uses
from trainspan_processing.rewards.rollout_rewards import reward_rollouts
from trainspan_processing.traces.rollout_reader import stored_rollouts
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tools import ToolResult, results_to_json

B = "chatcmpl-tool-b"
"""Long enough for a record of another trace."""


def _log(rollout: TestRollout, at: float, *, traced: bool = True, **attributes: str) -> None:
    """A record in the rollout's trace, or one that only names the rollout."""
    attributes |= {} if traced else {keys.ROLLOUT_ID: rollout.rollout_id}
    pairs = [
        KeyValue(key=key.replace("__", "."), value=AnyValue(string_value=value)) for key, value in attributes.items()
    ]
    rollout.logs.append(
        LogRecord(
            time_unix_nano=START_NS + round(at * 1e9),
            trace_id=bytes.fromhex(rollout.trace_id) if traced else b"",
            span_id=bytes.fromhex(rollout.root) if traced else b"",
            event_name="event src/some.rs:54",
            attributes=pairs,
        )
    )


def _asks(*ids: str) -> dict[str, Any]:
    return {keys.CALL_TOOL_CALLS: list(ids)}


def _brings(*results: ToolResult) -> dict[str, Any]:
    return {keys.CALL_TOOL_RESULTS: results_to_json(results)}


@pytest.fixture
def rollout(bench: Bench) -> TestRollout:
    """Call 0 asks for a and b, call 1 for c, call 2 for d; calls 1 to 3 bring the results. a has a span and a record, b a record, c only
    the result; nothing is known of d."""
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], at=1.0, **_asks("a", B))
    rollout.span("tool a", 2.0, 2.5, span__type="tool", tool_name="Bash", **{"gen_ai.tool.call.id": "a"})
    _log(rollout, 2.6, event__name="tool_result", tool_use_id="a", success="false", duration_ms="400", error="exit 1",
         tool_input='{"command": "ls"}')  # fmt: skip
    _log(rollout, 4.0, traced=False, event__name="codex.tool_result", tool_name="exec", call_id=B, success="true",
         duration_ms="1000", arguments="{}", output="done")  # fmt: skip
    _log(rollout, 4.0, event__name="codex.tool_result", tool_name="exec", call_id="a stranger's", success="false")
    _log(rollout, 4.0, event__name="codex.tool_decision", tool_name="exec", call_id=B, decision="approved")
    brought = (
        ToolResult("a", "Bash", '{"command": "ls"}', "no file", is_error=True),
        ToolResult(B, "desk__exec", "{}", "done and more", is_error=None),
    )
    rollout.call(1, [1, 2], [3], at=5.0, **_asks("c"), **_brings(*brought))
    rollout.call(
        2, [1, 2, 3], [4], at=6.0, **_asks("d"), **_brings(ToolResult("c", "Edit", "{}", "bad JSON", is_error=True))
    )
    rollout.reward(1.0)
    bench.send(rollout)
    return rollout


def test_each_use_has_what_spans_records_and_requests_say_and_the_call_that_asked(
    bench: Bench, rollout: TestRollout
) -> None:
    with bench.source() as source:
        traces = bench.traces()
        uses = read_tool_uses(source, traces.calls, traces.spans)
        ((_, stored),) = stored_rollouts(source, traces, traces.rollouts)
    index = {row[0]: row[1] for row in traces.calls.select("span_id", "call_index").iter_rows()}
    rows = [
        (row["tool_call_id"], index[row["call_span_id"]], row["name"], row["arguments"], row["result"], row["failed"], row["error"])
        for row in uses.iter_rows(named=True)
    ]  # fmt: skip
    assert rows == [
        ("a", 0, "Bash", '{"command": "ls"}', "no file", True, "exit 1"),
        (B, 0, "desk__exec", "{}", "done", False, None),
        ("c", 1, "Edit", "{}", "bad JSON", True, None),
    ]
    tools = [(tool.name, tool.call, tool.seconds, tool.failed) for tool in stored.tools]
    assert tools == [("Bash", 0, 0.5, True), ("desk__exec", 0, 1.0, False), ("Edit", 1, None, True)]


def test_signals_of_tools_cost_the_call_that_asked_for_them(bench: Bench, rollout: TestRollout) -> None:
    air = "tool_error=-1,parse_error=-2,output:^done=-4"
    with bench.source() as source:
        traces = bench.traces()
        rewarded = reward_rollouts(source, traces, DatasetSettings(air=air))
    index = {row[0]: row[1] for row in traces.calls.select("span_id", "call_index").iter_rows()}
    edges = rewarded.edges.filter(rewarded.edges["name"] == "air")
    found = {(row["rule"], index[row["call_span_id"]]): row["score"] for row in edges.iter_rows(named=True)}
    assert found == {
        ("air:tool_error", 0): -1.0,
        ("air:output:^done", 0): -4.0,
        ("air:tool_error", 1): -1.0,
        ("air:parse_error", 1): -2.0,
    }


def test_steps_of_a_framework_without_ids_are_not_told_twice(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], at=1.0, **_asks("x", "y"))
    step = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add"}
    rollout.span("tool", 2.0, 2.5, **step)
    results = (
        ToolResult("x", "add", "[1]", "3", is_error=None),
        ToolResult("y", "otherwise_named", "[]", "4", is_error=None),
    )
    rollout.call(1, [1, 2], [3], at=5.0, **_brings(*results))
    bench.send(rollout)
    with bench.source() as source:
        traces = bench.traces()
        uses = read_tool_uses(source, traces.calls, traces.spans)
    assert uses.select("tool_call_id", "name", "arguments", "result").rows() == [("x", "add", "[1]", "3")]
    assert uses["call_span_id"].to_list() == traces.calls.filter(traces.calls["call_index"] == 0)["span_id"].to_list()


def _uses(bench: Bench, rollout: TestRollout, *columns: str) -> list[tuple[Any, ...]]:
    """The values of the columns, each after the index of the call that asked."""
    bench.send(rollout)
    with bench.source() as source:
        traces = bench.traces()
        uses = read_tool_uses(source, traces.calls, traces.spans)
    index = {row[0]: row[1] for row in traces.calls.select("span_id", "call_index").iter_rows()}
    return [(index.get(row["call_span_id"]), *(row[name] for name in columns)) for row in uses.iter_rows(named=True)]


def test_an_id_that_comes_again_belongs_to_the_last_call_before_its_outcome(bench: Bench) -> None:
    rollout, again = bench.rollout("a"), "functions.bash:0"
    rollout.call(0, [1], [2], at=1.0, **_asks(again))
    rollout.call(1, [1, 2], [3], at=2.0, **_brings(ToolResult(again, "bash", "{}", "exit 1", is_error=True)))
    rollout.call(2, [5], [6], at=3.0, **_asks(again))  # after a compaction the parser counts from 0 again
    _log(rollout, 3.5, event__name="tool_result", tool_use_id=again, success="true", duration_ms="100")
    rollout.call(3, [5, 6], [7], at=4.0, **_brings(ToolResult(again, "bash", "{}", "fine", is_error=None)))
    assert _uses(bench, rollout, "result", "failed") == [(0, "exit 1", True), (2, "fine", False)]


def _of(agent: str) -> dict[str, Any]:
    return {keys.GEN_AI_AGENT_NAME: agent}


def test_an_id_of_concurrent_sub_agents_of_one_name_belongs_to_neither(bench: Bench) -> None:
    rollout, same = bench.rollout("a"), "functions.bash:0"
    one, two = (ToolResult(same, "bash", arguments, arguments, is_error=None) for arguments in ("ls", "pwd"))
    rollout.call(0, [1], [2], at=1.0, **_of("s"), **_asks(same))
    rollout.call(1, [5], [6], at=1.1, **_of("s"), **_asks(same))
    _log(rollout, 1.5, event__name="tool_result", tool_use_id=same, tool_input="pwd", success="false")
    rollout.call(2, [1, 2], [3], at=2.0, **_of("s"), **_brings(one))
    rollout.call(3, [5, 6], [7], at=2.1, **_of("s"), **_brings(two))
    rollout.call(4, [1, 2, 3], [4], at=3.0, **_of("s"), **_asks(same), **_brings(one))  # the history again
    later = ToolResult(same, "bash", "ls", "later", is_error=None)
    rollout.call(5, [8], [9], at=4.0, **_of("s"), **_brings(later))
    assert _uses(bench, rollout, "arguments", "result", "failed") == [
        (None, "pwd", "pwd", True),
        (None, "ls", "ls", False),
        (4, "ls", "later", False),
    ]


def test_an_outcome_that_began_between_two_calls_goes_with_its_arguments(bench: Bench) -> None:
    rollout, same = bench.rollout("a"), "functions.bash:0"
    rollout.call(0, [1], [2], at=1.0, **_of("s"), **_asks(same))
    step = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "bash", "gen_ai.tool.call.id": same}
    rollout.span("tool", 1.2, 1.9, **step, **{"gen_ai.tool.call.arguments": "ls"})
    rollout.call(1, [5], [6], at=1.5, **_of("s"), **_asks(same))
    rollout.call(2, [5, 6], [7], at=2.0, **_of("s"), **_brings(ToolResult(same, "bash", "pwd", "/", is_error=None)))
    rollout.call(3, [1, 2], [3], at=2.1, **_of("s"), **_brings(ToolResult(same, "bash", "ls", "a.py", is_error=None)))
    assert _uses(bench, rollout, "arguments", "result") == [(0, "ls", "a.py"), (None, "pwd", "/")]


def test_a_call_whose_answer_no_client_had_asked_for_nothing(bench: Bench) -> None:
    rollout, same = bench.rollout("a"), "functions.bash:0"
    rollout.call(0, [1], [2], at=1.0, **{keys.CALL_DELIVERED: False}, **_asks(same))
    rollout.call(1, [1], [3], at=2.0, **_asks(same))
    rollout.call(2, [1, 3], [4], at=3.0, **_brings(ToolResult(same, "bash", "ls", "a.py", is_error=None)))
    assert _uses(bench, rollout, "result") == [(1, "a.py")]


@pytest.mark.parametrize("again", [False, True])
def test_a_result_of_the_agent_that_asked_comes_before_what_a_sub_agent_inherits(bench: Bench, again: bool) -> None:
    rollout = bench.rollout("a")
    fork, task = (
        ToolResult(B, "Task", "{}", "Fork started", is_error=True),
        ToolResult(B, "Task", "{}", "42", is_error=False),
    )
    rollout.call(0, [1], [2], at=1.0, **_of("main"), **_asks(B))
    rollout.call(1, [1, 2], [3], at=2.0, **_of("s"), **_brings(fork))
    rollout.call(2, [1, 2], [4], at=3.0, **_of("main"), **_brings(task))
    if again:
        rollout.call(3, [1, 2, 3], [4], at=4.0, **_of("s"), **_brings(fork))
    assert _uses(bench, rollout, "result", "failed") == [(0, "42", False)]


def test_a_failure_that_only_the_request_tells_counts(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], at=1.0, **_asks(B, "chatcmpl-tool-c"))
    for call_id, success in ((B, "true"), ("chatcmpl-tool-c", "false")):
        _log(rollout, 2.0, event__name="tool_result", tool_use_id=call_id, success=success)
    results = (
        ToolResult(B, "f", "{}", "no", is_error=True),
        ToolResult("chatcmpl-tool-c", "g", "{}", "y", is_error=False),
    )
    rollout.call(1, [1, 2], [3], at=3.0, **_brings(*results))
    assert _uses(bench, rollout, "name", "failed") == [(0, "f", True), (0, "g", True)]


def test_an_id_of_several_choices_belongs_to_none_of_them(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], at=1.0, **_asks("functions.bash:0"))
    rollout.call(1, [1], [3], at=1.0, **_asks("functions.bash:0"))
    rollout.call(2, [1, 2], [4], at=2.0, **_brings(ToolResult("functions.bash:0", "bash", "{}", "ok", is_error=None)))
    assert _uses(bench, rollout, "result") == [(None, "ok")]


@pytest.mark.parametrize("duration", ["inf", "nan", "1e30", "-5", "one"])
def test_a_duration_that_is_none_is_no_duration(bench: Bench, duration: str) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], at=1.0, **_asks("x"))
    _log(rollout, 2.0, event__name="tool_result", tool_use_id="x", duration_ms=duration)
    at_ns = START_NS + 2_000_000_000
    assert _uses(bench, rollout, "start_ns", "end_ns") == [(0, at_ns, at_ns)]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '[{"id":[],"name":"n","arguments":"","result":"5","is_error":null}]', '{"id":"x"}', "5"]
)
def test_results_of_another_form_are_no_results(bench: Bench, text: str) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], at=1.0, **_asks("x"), **{keys.CALL_TOOL_RESULTS: text})
    assert _uses(bench, rollout) == []


def test_a_record_of_another_trace_needs_an_id_that_nobody_guesses(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], at=1.0, **_asks("functions.bash:0", B))
    for guessed in ("functions.bash:0", B):
        _log(rollout, 2.0, traced=False, event__name="tool_result", tool_use_id=guessed, success="false")
    assert _uses(bench, rollout, "tool_call_id") == [(0, B)]


def test_a_span_without_an_id_and_a_record_with_it_are_one_step(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], at=1.0, **_asks("x"))
    step = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "bash", "gen_ai.tool.call.arguments": "ls"}
    rollout.span("tool", 2.0, 2.5, **step)
    _log(rollout, 2.6, event__name="tool_result", tool_use_id="x", tool_name="bash", success="false", duration_ms="400")
    rollout.call(1, [1, 2], [3], at=3.0, **_brings(ToolResult("x", "bash", "ls", "no", is_error=True)))
    assert _uses(bench, rollout, "tool_call_id", "arguments", "result", "failed") == [(0, "x", "ls", "no", True)]


def test_of_two_spans_with_one_id_the_failure_and_the_whole_time_count(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], at=1.0, **_asks("x"))
    step = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "bash", "gen_ai.tool.call.id": "x"}
    rollout.span("outer", 2.0, 6.0, **step, success="false", error="TimeoutError")
    rollout.span("inner", 2.5, 3.0, **step)
    ((_, failed, error, start_ns, end_ns),) = _uses(bench, rollout, "failed", "error", "start_ns", "end_ns")
    assert (failed, error, (end_ns - start_ns) / 1e9) == (True, "TimeoutError", 4.0)


def test_a_dataset_can_select_kinds(bench: Bench) -> None:
    for name, reward in (("a", 0.0), ("b", 1.0)):
        rollout = bench.rollout(name)
        rollout.call(0, [1], [2], at=1.0)
        rollout.reward(reward)
        bench.send(rollout)
    dataset = bench.build(agents="kind:main")
    assert rows(dataset)["call_kind"].unique().to_list() == ["main"]
