"""Outcomes of tools from spans, log records and requests, joined with the call whose answer asked for them."""

from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.processing.conftest import Bench
from tests.processing.support.traces import START_NS, TestRollout
from trainspan_processing.read.tool_uses import read_tool_uses
from trainspan_processing.rewards.rollout_rewards import reward_rollouts
from trainspan_processing.traces.rollout_reader import stored_rollouts
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tools import ToolResult, results_to_json


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
    rollout.call(0, [1], [2], at=1.0, **_asks("a", "b"))
    rollout.span("tool a", 2.0, 2.5, span__type="tool", tool_name="Bash", **{"gen_ai.tool.call.id": "a"})
    _log(rollout, 2.6, event__name="tool_result", tool_use_id="a", success="false", duration_ms="400", error="exit 1",
         tool_input='{"command": "ls"}')  # fmt: skip
    _log(rollout, 4.0, traced=False, event__name="codex.tool_result", tool_name="exec", call_id="b", success="true",
         duration_ms="1000", arguments="{}", output="done")  # fmt: skip
    _log(rollout, 4.0, event__name="codex.tool_result", tool_name="exec", call_id="a stranger's", success="false")
    _log(rollout, 4.0, event__name="codex.tool_decision", tool_name="exec", call_id="b", decision="approved")
    brought = (
        ToolResult("a", "Bash", '{"command": "ls"}', "no file", is_error=True),
        ToolResult("b", "exec", "{}", "done and more", is_error=None),
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
        ("b", 0, "exec", "{}", "done", False, None),
        ("c", 1, "Edit", "{}", "bad JSON", True, None),
    ]
    tools = [(tool.name, tool.call, tool.seconds, tool.failed) for tool in stored.tools]
    assert tools == [("Bash", 0, 0.5, True), ("exec", 0, 1.0, False), ("Edit", 1, None, True)]


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
