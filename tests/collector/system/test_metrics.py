"""The collector's status interfaces: /metrics, /healthz, /readyz and grpc.health.v1."""

import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.support.collector.process import (
    ANY_PORT,
    LOGS,
    TRACES,
    CollectorProcess,
    channel,
    export,
    read,
    running,
    send,
    span,
)
from tests.support.otlp.http import request
from trainspan_schemas.telemetry import keys

CALL = {
    keys.PROMPT_TOKEN_IDS: b"\1\0\0\0",
    keys.COMPLETION_TOKEN_IDS: b"\2\0\0\0",
    keys.COMPLETION_LOGPROBS: b"\0\0\0\0",
    keys.GEN_AI_FINISH_REASONS: ["stop"],
    keys.POLICY_NAME: "p",
}


def _figures(collector: CollectorProcess) -> dict[tuple[str, ...], float]:
    """(name without the prefix, label values…) → value; also checks that Prometheus can parse the page."""
    answer = request(collector.address, "/metrics", method="GET", content_type=None)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.body.decode())
    return {
        (
            sample.name.removeprefix("trainspan_collector_"),
            *(sample.labels[name] for name in sorted(sample.labels)),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def _eventually(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_counters_add_up_to_what_was_sent(tmp_path: Path) -> None:
    with running(tmp_path / "s.duckdb", http=ANY_PORT) as collector:
        address = collector.address
        export(
            address,
            span(1, 1, {**CALL, keys.POLICY_VERSION: 3}),
            span(1, 2, {**CALL, keys.POLICY_VERSION: 2, keys.COMPLETION_LOGPROBS: b""}),
            span(1, 3, {"gen_ai.operation.name": "chat"}),
            span(1, 4, {"openinference.span.kind": "LLM"}),
            span(1, 5, {"llm.request.type": "chat"}),
            span(1, 6, {"http.method": "GET"}),
            span(0, 7),
        )
        export(address, span(1, 6, {"http.method": "GET"}))
        send(address, LOGS, b"")
        request(address, "/v1/metrics", b"")
        request(address, "/v1/traces", b"\xff\xff")
        assert len(read(address, "spans")) == 6
        found = _figures(collector)
        expected = {
            ("accepted_requests_total", "traces", "grpc"): 2,
            ("accepted_requests_total", "logs", "grpc"): 1,
            ("accepted_requests_total", "metrics", "http"): 1,
            ("accepted_items_total", "traces"): 7,
            ("rejected_items_total", "invalid_id", "traces"): 1,
            ("refused_requests_total", "invalid", "http"): 1,
            ("duplicates_total",): 1,
            ("spans_total", "trainspan"): 2,
            ("spans_total", "gen_ai"): 1,
            ("spans_total", "openinference"): 1,
            ("spans_total", "traceloop"): 1,
            ("calls_total",): 2,
            ("untrainable_calls_total", "no_logprobs"): 1,
            ("stale_calls_total",): 1,
            ("commit_seconds_count",): 2,
            ("ready",): 1,
            ("loader_lag_bytes",): 0,
            ("loader_lag_seconds",): 0,
            ("queued_requests",): 0,
            ("inflight_bytes",): 0,
            ("quarantined_requests",): 0,
        }
        assert {key: found[key] for key in expected} == expected
        assert found["spans_total", "other"] in (1, 2)  # 2 if the copy was loaded separately
        assert found["last_commit_age_seconds",] < 60
        assert found["journal_bytes",] > 0
        assert found["disk_free_bytes",] > 0
        assert found["store_bytes",] > 0


def test_the_loaders_lag_is_seen_while_it_lags(tmp_path: Path) -> None:
    with running(tmp_path / "s.duckdb", load_interval_s=30, http=ANY_PORT) as collector:
        export(collector.address, span(1, 1))
        lagging = _figures(collector)
        assert lagging["loader_lag_bytes",] > 0
        _eventually(lambda: _figures(collector)["loader_lag_seconds",] > lagging["loader_lag_seconds",])
        read(collector.address, "spans")
        assert _figures(collector)["loader_lag_bytes",] == 0


def test_health_is_sent_over_grpc_once_and_at_each_change(tmp_path: Path) -> None:
    with running(tmp_path / "s.duckdb", http=ANY_PORT) as collector, channel(collector.address) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        trace_service = TRACES.split("/")[1]
        for service in ("", trace_service):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=5)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watched = stub.Watch(health_pb2.HealthCheckRequest(service=trace_service), timeout=20)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        collector.process.terminate()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watched.cancel()


def test_alive_and_ready_answer_plainly(collector: CollectorProcess) -> None:
    for path in ("/healthz", "/readyz"):
        for method, body in (("GET", b"ok\n"), ("HEAD", b"")):
            answer = request(collector.address, path, method=method, content_type=None)
            assert (answer.status, answer.body) == (200, body)
