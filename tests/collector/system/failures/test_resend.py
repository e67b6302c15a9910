"""Resending the same bytes changes no view: not within a request, not later, not after a restart."""

import random
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.support.collector.process import (
    LOGS,
    TRACES,
    CollectorProcess,
    any_value,
    event,
    get,
    key_values,
    running,
    send,
    span,
    span_id,
    trace_id,
    trace_request,
)
from trainspan_schemas.store.views import VIEWS
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs


def _requests() -> list[tuple[str, bytes]]:
    """Three rollouts: rewards as events and as records, with and without id or time; late and partially sent spans."""
    requests = []
    for trace in (1, 2, 3):
        identity = {keys.ROLLOUT_ID: f"r{trace}", keys.ATTEMPT: 0, keys.RUN_ID: "run", keys.TASK_ID: f"t{trace}"}
        tokens = {
            keys.PROMPT_TOKEN_IDS: encode_ids([1, 2]),
            keys.COMPLETION_TOKEN_IDS: encode_ids([3]),
            keys.COMPLETION_LOGPROBS: encode_logprobs([-0.5]),
        }
        reward = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 0.25}
        events = [
            event(keys.EVALUATION_EVENT, reward),
            event(keys.EVALUATION_EVENT, {**reward, keys.EVALUATION_ID: f"e{trace}"}),
        ]
        spans = [
            span(trace, 1, {**identity, keys.ROLLOUT_STATUS: "ok"}, events=events),
            span(trace, 2, {**identity, **tokens}, parent_span_id=span_id(1)),
            span(trace, 3, tokens),
        ]
        requests += [(TRACES, trace_request(*spans).SerializeToString())]
        requests += [
            (
                TRACES,
                trace_request(
                    span(trace, 2, name="started", parent_span_id=span_id(1), end_time_unix_nano=0)
                ).SerializeToString(),
            )
        ]
        records = [
            LogRecord(
                event_name=keys.EVALUATION_EVENT, attributes=key_values({**reward, keys.ROLLOUT_ID: f"r{trace}"})
            ),
            LogRecord(
                time_unix_nano=7,
                trace_id=trace_id(trace),
                event_name=keys.EVALUATION_EVENT,
                attributes=key_values({**reward, keys.EVALUATION_ID: f"e{trace}"}),  # the event's copy
            ),
            LogRecord(time_unix_nano=9, trace_id=trace_id(trace), body=any_value({"k": [1, b"\x00"]})),
        ]
        logs = ExportLogsServiceRequest()
        logs.resource_logs.add().scope_logs.add().log_records.extend(records)
        requests += [(LOGS, logs.SerializeToString())]
    return requests


def _views(collector: CollectorProcess) -> dict[str, list[dict[str, Any]]]:
    return {
        name: sorted(get(collector.address, {"sql": f"SELECT * FROM {name}"}).to_pylist(), key=repr) for name in VIEWS
    }


@pytest.mark.ci
def test_the_same_requests_again_in_any_order_and_after_a_restart_change_no_view(tmp_path: Path) -> None:
    requests = _requests()
    order = random.Random(3)
    with running(tmp_path / "spans.duckdb") as collector:
        for method, body in requests:
            send(collector.address, method, body)
        before = _views(collector)
        # One reward from an event, one with an id (its copy in a record is the same), one from a record: 3 × 0.25.
        assert [row["reward"] for row in before["rollouts"]] == [0.75] * 3
        assert {name: len(rows) for name, rows in before.items()} == {
            "spans": 9, "logs": 9, "calls": 6, "evaluations": 9, "rollouts": 3,
        }  # fmt: skip
        for method, body in order.sample(requests * 3, 3 * len(requests)):
            send(collector.address, method, body)
        assert _views(collector) == before
    with running(tmp_path / "spans.duckdb", load_interval_s=30) as again:
        for method, body in order.sample(requests * 2, 2 * len(requests)):
            send(again.address, method, body)
        again.kill()
    with running(tmp_path / "spans.duckdb") as third:
        assert _views(third) == before
