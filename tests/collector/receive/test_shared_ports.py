"""Both OTLP ports speak gRPC and HTTP: an exporter needs to know only one address."""

import socket
import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.collector.process import (
    TRACES,
    CollectorProcess,
    channel,
    running,
    select,
    send,
    span,
    trace_id,
    trace_request,
)
from tests.support.otlp.http import PROTOBUF, raw, request
from tests.support.ports import free_port
from trainspan_schemas.store.access import StoreAddress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


def _swapped(address: StoreAddress) -> StoreAddress:
    """The address with gRPC at the port of HTTP and the other way around."""
    return replace(address, grpc=address.http, http=address.grpc)


def _n_spans(collector: CollectorProcess, trace: int) -> int:
    [(count,)] = select(collector.address, f"SELECT count(*) FROM spans WHERE trace_id = '{trace_id(trace).hex()}'")
    return int(count)


@pytest.mark.parametrize("n_bytes", [10, 20 << 20])
def test_each_port_takes_both_protocols(collector: CollectorProcess, n_bytes: int) -> None:
    address, trace = _swapped(collector.address), 7000 + n_bytes % 7
    parts = [span(trace, number, {"text": "x" * (n_bytes // 8)}) for number in range(1, 9)]
    send(address, TRACES, trace_request(*parts[:4]).SerializeToString())
    body = trace_request(*parts[4:]).SerializeToString()
    answer = request(address, "/v1/traces", body=body, headers={"Content-Type": PROTOBUF})
    assert answer.status == 200
    assert _n_spans(collector, trace) == 8


def test_the_first_bytes_may_come_one_by_one(collector: CollectorProcess) -> None:
    for address in (collector.address, _swapped(collector.address)):
        host, _, port = str(address.http).rpartition(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            for number in range(len(PREFACE)):
                connection.sendall(PREFACE[number : number + 1])
                time.sleep(0.002)
            assert connection.recv(9)[3] == 4, "the settings of HTTP/2"
        with socket.create_connection((host, int(port)), 10) as connection:
            for number in range(3):
                connection.sendall(b"PRO"[number : number + 1])  # no client of gRPC after all
                time.sleep(0.002)
            connection.sendall(b"PFIND / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 404"


def test_what_is_neither_is_refused(collector: CollectorProcess) -> None:
    assert raw(_swapped(collector.address), b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400")
    host, _, port = str(collector.address.grpc).rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection, pytest.raises(OSError, match=r"SSL|reset"):
        ssl._create_unverified_context().wrap_socket(connection)


def test_a_client_that_does_not_read_holds_nobody_up(collector: CollectorProcess) -> None:
    host, _, port = str(collector.address.grpc).rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(PREFACE)
        connection.settimeout(1.0)
        ping = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + bytes(8)
        sent = 0
        try:
            while sent < 200 << 20:
                sent += connection.send(ping * 4096)
        except OSError:
            pass  # the server stopped reading, or ended the connection
        assert sent < 200 << 20
        send(collector.address, TRACES, trace_request(span(7100, 1)).SerializeToString())
    assert _n_spans(collector, 7100) == 1


def test_without_http_the_port_of_grpc_is_its_own(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", "--http", "off") as collector:
        send(collector.address, TRACES, trace_request(span(1, 1)).SerializeToString())
        assert _n_spans(collector, 1) == 1


@pytest.mark.ci
def test_a_collector_that_starts_again_takes_the_same_connection_on(tmp_path: Path) -> None:
    ports = ("--grpc", f"127.0.0.1:{free_port()}", "--http", f"127.0.0.1:{free_port()}")
    body = [trace_request(span(1, number)).SerializeToString() for number in (1, 2)]
    with running(tmp_path / "spans.duckdb", *ports) as collector, channel(collector.address) as opened:
        opened.unary_unary(TRACES)(body[0], timeout=20)
        assert collector.terminate() == 0
        metadata = []
        with running(tmp_path / "spans.duckdb", *ports) as again:
            metadata.append(("authorization", f"Bearer {again.address.token}"))
            opened.unary_unary(TRACES)(body[1], timeout=20, wait_for_ready=True, metadata=metadata)
            assert _n_spans(again, 1) == 2
