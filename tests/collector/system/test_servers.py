"""The listeners without a store: answers to senders while it is reopened, or while the collector stops."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.collector.process import LOGS, METRICS, TRACES, send, span, trace_request
from tests.support.otlp.http import request
from trainspan_collector.journal.frames import Signal
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.segments import Position
from trainspan_collector.network.access import Access
from trainspan_collector.network.credentials import AccessControl
from trainspan_collector.network.ports import Address
from trainspan_collector.receive.admission import Admission
from trainspan_collector.runtime.metrics import Metrics, StoreState
from trainspan_collector.servers import Servers
from trainspan_schemas.config.settings import CollectorSettings
from trainspan_schemas.store.access import StoreAddress
from trainspan_schemas.store.roles import Role

STATE = StoreState(True, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0, 0, 0, 0)
TOKEN = "r" * 20
BODY = trace_request(span(1, 1)).SerializeToString()


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Servers, Journal, StoreAddress]]:
    """Listeners that have had a journal once."""
    journal = Journal(folder)
    admission = Admission(journal, folder, min_free_disk_bytes=0, wait_s=0.1)
    any_port = [Address.parse(option, "127.0.0.1:0", allow_remote=False) for option in ("--grpc", "--http")]
    guard = AccessControl(Access({TOKEN: Role.RUNNER}, admits_agents=True), None, TOKEN)
    servers = Servers(CollectorSettings(), any_port[0], any_port[1], guard, Metrics())
    try:
        servers.bind()
        servers.open_to(admission, lambda: STATE)
        yield servers, journal, StoreAddress(0, "", servers.grpc_address, servers.http_address, "", token=TOKEN)
    finally:
        servers.close()
        journal.close()


def test_while_the_store_is_reopened_senders_are_told_when_to_retry(tmp_path: Path) -> None:
    with _opened(tmp_path) as (servers, journal, address):
        assert send(address, TRACES, BODY) == b""
        servers.shut()
        with pytest.raises(grpc.RpcError) as caught:
            send(address, TRACES, BODY)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the store is being opened"
        trailers = dict(caught.value.trailing_metadata())
        assert RetryInfo.FromString(trailers["google.rpc.retryinfo-bin"]).retry_delay.seconds == 1
        status, detail = Status.FromString(trailers["grpc-status-details-bin"]), RetryInfo()
        assert status.details[0].Unpack(detail)
        assert (status.code, detail.retry_delay.seconds) == (14, 1)
        answer = request(address, "/v1/traces", BODY)
        assert (answer.status, answer.headers["retry-after"], answer.error.code) == (503, "1", 14)
        assert send(address, METRICS, b"") == send(address, LOGS, b"") == b""  # nothing to store, nothing to refuse
        assert [request(address, path, method="GET").status for path in ("/healthz", "/readyz")] == [200, 503]
        page = request(address, "/metrics", method="GET").body.decode()
        assert 'refused_requests_total{reason="not_ready",transport="grpc"} 1.0' in page
        assert "trainspan_collector_ready 0.0" in page
        with grpc.insecure_channel(str(address.grpc)) as opened:
            health = health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        entries, _ = journal.read(Position(0, 0), 2**20)
        assert [entry.frame.body for entry in entries] == [BODY]


def test_the_same_connection_continues_with_the_reopened_store(tmp_path: Path) -> None:
    with _opened(tmp_path / "one") as (servers, first, address):
        with grpc.insecure_channel(str(address.grpc)) as opened:
            export = opened.unary_unary(TRACES)
            assert export(BODY, timeout=10) == b""
            servers.shut()
            first.close()
            second = Journal(tmp_path / "two")
            admission = Admission(second, tmp_path, min_free_disk_bytes=0, wait_s=0.1)
            servers.open_to(admission, lambda: STATE)
            assert export(BODY, timeout=10) == b""
        entries, _ = second.read(Position(0, 0), 2**20)
        assert [(entry.frame.signal, entry.frame.body) for entry in entries] == [(Signal.TRACES, BODY)]
        assert request(address, "/readyz", method="GET").status == 200
        second.close()


def test_a_journal_that_has_closed_refuses_with_the_time_to_come_back(tmp_path: Path) -> None:
    with _opened(tmp_path) as (_, journal, address):
        journal.close()
        with pytest.raises(grpc.RpcError) as caught:
            send(address, TRACES, BODY)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "google.rpc.retryinfo-bin" in dict(caught.value.trailing_metadata())
        assert request(address, "/v1/traces", BODY).headers["retry-after"] == "1"


def test_an_unknown_grpc_method_is_unimplemented(tmp_path: Path) -> None:
    with _opened(tmp_path) as (_, _, address):
        with pytest.raises(grpc.RpcError) as caught:
            send(address, "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export", b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        page = request(address, "/metrics", method="GET").body.decode()
    assert 'refused_requests_total{reason="not_found",transport="grpc"} 1.0' in page
