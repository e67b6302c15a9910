"""Senders that connect and stall: each costs bounded time, all of them a bounded number of connections."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.collector.process import TRACES, send, span, trace_request
from tests.support.otlp.http import PROTOBUF, request
from trainspan_collector.journal.journal import Journal
from trainspan_collector.network import grpc_limits
from trainspan_collector.network.access import Access
from trainspan_collector.network.credentials import AccessControl
from trainspan_collector.network.grpc_timeout import MessageTimeout
from trainspan_collector.network.ports import Address
from trainspan_collector.receive import grpc_server, http_body, http_server
from trainspan_collector.receive.admission import Admission
from trainspan_collector.runtime.metrics import Metrics, StoreState
from trainspan_collector.servers import Servers
from trainspan_schemas import http_connection
from trainspan_schemas.config.settings import CollectorSettings
from trainspan_schemas.store.access import StoreAddress
from trainspan_schemas.store.roles import Role

BODY = trace_request(span(1, 1)).SerializeToString()
HEAD = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\nContent-Length: {len(BODY)}\r\n".encode()
TOKEN = "r" * 20
LIMIT_S = 0.6
MOST = 8


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreAddress]:
    """The listeners with shorter timeouts and fewer connections than in production."""
    monkeypatch.setattr(http_connection, "SILENT_S", LIMIT_S)
    monkeypatch.setattr(http_body, "_BODY_S", LIMIT_S)
    monkeypatch.setattr(grpc_server, "_MESSAGE_S", LIMIT_S)
    monkeypatch.setattr(http_server._Connection, "most", MOST)
    monkeypatch.setattr(grpc_limits, "_MAX_CONNECTIONS", MOST)
    journal = Journal(tmp_path)
    admission = Admission(journal, tmp_path, min_free_disk_bytes=0, wait_s=0.1)
    ports = [Address.parse(option, "127.0.0.1:0", allow_remote=False) for option in ("--grpc", "--http")]
    guard = AccessControl(Access({TOKEN: Role.RUNNER}, admits_agents=True), None, TOKEN)
    servers = Servers(CollectorSettings(), ports[0], ports[1], guard, Metrics())
    try:
        servers.bind()
        servers.open_to(admission, lambda: StoreState(True, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0, 0, 0, 0))
        yield StoreAddress(0, "", servers.grpc_address, servers.http_address, "", token=TOKEN)
    finally:
        servers.close()
        journal.close()


def _connect(address: StoreAddress) -> socket.socket:
    host, _, port = str(address.http).rpartition(":")
    return socket.create_connection((host, int(port)), 20)


def _drip(connection: socket.socket, data: bytes, pause_s: float) -> bytes:
    """Sends byte by byte until the other side closes; returns everything it answered."""
    received = b""
    connection.settimeout(pause_s)
    with contextlib.suppress(ConnectionError):
        for byte in data:
            connection.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                part = connection.recv(65536)
                received += part
                if not part:
                    break
    return received


@pytest.mark.parametrize("sent", [b"", b"POST /v1/tra", HEAD])
def test_headers_that_do_not_end_end_the_connection(address: StoreAddress, sent: bytes) -> None:
    with _connect(address) as connection:
        began = time.monotonic()
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1000) == b""
        assert LIMIT_S * 0.9 <= time.monotonic() - began < 10
    assert request(address, "/v1/traces", BODY).status == 200


def test_headers_that_drip_get_no_more_time_than_others(address: StoreAddress) -> None:
    with _connect(address) as connection:
        began = time.monotonic()
        assert _drip(connection, HEAD * 10, 0.1) == b""
        assert time.monotonic() - began < 10  # sending everything would take three minutes


def test_a_body_that_drips_is_answered_408_and_what_comes_after_it_ends_with_the_connection(
    address: StoreAddress,
) -> None:
    with _connect(address) as connection:
        connection.sendall(HEAD + b"\r\n")
        began = time.monotonic()
        received = _drip(connection, BODY[:-1] * 10, 0.1)
        assert received.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < 10
    page = request(address, "/metrics", method="GET").body.decode()
    assert 'refused_requests_total{reason="too_slow",transport="http"} 1.0' in page


def test_a_connection_that_sends_one_request_after_the_other_lives_on(address: StoreAddress) -> None:
    with _connect(address) as connection:
        for _ in range(5):
            connection.sendall(HEAD + b"\r\n" + BODY)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            time.sleep(LIMIT_S / 2)
        connection.sendall(2 * (HEAD + b"\r\n" + BODY))  # the second arrives before the first is answered
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 2:
            received += connection.recv(65536)


def test_of_too_many_connections_the_longest_silent_one_is_closed_and_one_with_a_request_is_not(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "_BODY_S", 60.0)
    with contextlib.ExitStack() as opened:
        busy = opened.enter_context(_connect(address))
        busy.sendall(HEAD + b"Expect: 100-continue\r\n\r\n")
        assert busy.recv(1000).startswith(b"HTTP/1.1 100 ")
        first, *_ = [opened.enter_context(_connect(address)) for _ in range(MOST)]
        first.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b""
        assert request(address, "/v1/traces", BODY).status == 200
        busy.sendall(BODY)
        assert busy.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_grpc_message_that_does_not_come_ends_the_call(address: StoreAddress) -> None:
    go_on = threading.Event()

    def nothing() -> Iterator[bytes]:
        go_on.wait(20)
        yield b""

    with grpc.insecure_channel(str(address.grpc)) as opened:
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            opened.stream_unary(TRACES)(nothing(), timeout=20)
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        assert LIMIT_S * 0.9 <= time.monotonic() - began < 10
        go_on.set()
        assert opened.unary_unary(TRACES)(BODY, timeout=10) == b""
    page = request(address, "/metrics", method="GET").body.decode()
    assert 'refused_requests_total{reason="too_slow",transport="grpc"} 1.0' in page


def test_a_grpc_sender_that_gives_up_is_not_counted_as_refused_and_none_without_a_message_is_taken(
    address: StoreAddress,
) -> None:
    go_on = threading.Event()

    def nothing() -> Iterator[bytes]:
        go_on.wait(20)
        yield from ()

    with grpc.insecure_channel(str(address.grpc)) as opened:
        with pytest.raises(grpc.RpcError) as caught:
            opened.stream_unary(TRACES)(nothing(), timeout=LIMIT_S / 4)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        go_on.set()
        with pytest.raises(grpc.RpcError) as caught:
            opened.stream_unary(TRACES)(iter(()), timeout=20)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    page = request(address, "/metrics", method="GET").body.decode()
    assert page.count("refused_requests_total{") == 1
    assert 'refused_requests_total{reason="invalid",transport="grpc"} 1.0' in page


def test_grpc_connections_beyond_the_limit_are_asked_to_retry(address: StoreAddress) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with contextlib.ExitStack() as opened:
        for _ in range(MOST):
            channel = opened.enter_context(grpc.insecure_channel(str(address.grpc), options))
            assert channel.unary_unary(TRACES)(b"", timeout=10) == b""
        with pytest.raises(grpc.RpcError) as caught:
            send(address, TRACES, BODY)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_an_idle_message_timeout_does_not_wake_up() -> None:
    """Each wake-up takes the interpreter lock from the other listeners."""
    timeout = MessageTimeout(LIMIT_S)
    call: Any = _Call()
    try:
        with timeout.waiting(call):
            pass
        time.sleep(LIMIT_S)
        before = _n_wake_ups(timeout)
        time.sleep(LIMIT_S)
        assert _n_wake_ups(timeout) == before
        with timeout.waiting(call) as wait:
            assert call.canceled.wait(20)
            assert wait.is_over
    finally:
        timeout.close()


class _Call:
    """The part of a call's context that is used."""

    def __init__(self) -> None:
        self.canceled = threading.Event()

    def cancel(self) -> None:
        self.canceled.set()


def _n_wake_ups(timeout: MessageTimeout) -> int:
    status = Path(f"/proc/self/task/{timeout._thread.native_id}/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
