"""SIGHUP: tokens and certificates are reloaded while a real collector serves; without any, it exits."""

import contextlib
import signal
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.support.collector.process import (
    ANY_PORT,
    TRACES,
    CollectorProcess,
    export,
    read,
    running,
    span,
    trace_request,
)
from tests.support.otlp.http import request
from tests.support.tls import make_certificate

OLD, NEW, READER = (f"{name}-{'x' * 20}" for name in ("old", "new", "reader"))
BODY = trace_request(span(1, 1)).SerializeToString()


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def _status(collector: CollectorProcess, token: str) -> int:
    return request(collector.address, "/v1/traces", BODY, headers={"authorization": f"Bearer {token}"}).status


def test_new_tokens_are_in_use_at_once_and_a_file_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    _write(tokens, f'agent = "{OLD}"\n')
    arguments = ("--token-file", str(tokens))
    with running(tmp_path / "spans.duckdb", *arguments, http=ANY_PORT) as collector:
        own = collector.address.token
        assert [_status(collector, token) for token in (OLD, NEW, str(own))] == [200, 401, 200]
        _write(tokens, f'agent = ["{NEW}"]\nreader = "{READER}"\n')
        collector.process.send_signal(signal.SIGHUP)
        _until(lambda: _status(collector, NEW) == 200)
        assert [_status(collector, token) for token in (OLD, READER, str(own))] == [401, 403, 200]
        with grpc.insecure_channel(str(collector.address.grpc)) as channel:
            for token, code in ((OLD, grpc.StatusCode.UNAUTHENTICATED), (NEW, None)):
                with contextlib.suppress(grpc.RpcError) if code is None else pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(TRACES)(BODY, metadata=(("authorization", f"Bearer {token}"),), timeout=10)
                assert code is None or caught.value.code() == code
        _write(tokens, "agent = 7")
        collector.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert _status(collector, NEW) == 200
        collector.terminate()
        assert collector.process.stderr is not None
        assert "cannot reload" in collector.process.stderr.read()


def test_a_new_certificate_is_served_on_every_listener(tmp_path: Path) -> None:
    first = make_certificate(tmp_path)
    arguments = ("--tls-cert", str(first.certificate), "--tls-key", str(first.key))
    with running(tmp_path / "spans.duckdb", *arguments, http=ANY_PORT) as collector:
        ports = [address.rpartition(":")[2] for address in _addresses(collector)]
        before = ssl.PEM_cert_to_DER_cert(first.certificate.read_text())
        assert {_served(port) for port in ports} == {before}
        second = make_certificate(tmp_path)  # replaces the first
        collector.process.send_signal(signal.SIGHUP)
        after = ssl.PEM_cert_to_DER_cert(second.certificate.read_text())
        _until(lambda: {_served(port) for port in ports} == {after})


@pytest.mark.ci
def test_a_certificate_without_its_key_changes_nothing_and_the_log_says_so(tmp_path: Path) -> None:
    first = make_certificate(tmp_path)
    other = make_certificate(tmp_path, "other")
    arguments = ("--tls-cert", str(first.certificate), "--tls-key", str(first.key))
    with running(tmp_path / "spans.duckdb", *arguments, http=ANY_PORT) as collector:
        ports = [address.rpartition(":")[2] for address in _addresses(collector)]
        before, key = ssl.PEM_cert_to_DER_cert(first.certificate.read_text()), first.key.read_bytes()
        for file in (first.key, first.certificate):  # change one of the pair, then both
            file.write_bytes((other.key if file == first.key else other.certificate).read_bytes())
            collector.process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline and file == first.key:
                assert {_served(port) for port in ports} == {before}
        after = ssl.PEM_cert_to_DER_cert(other.certificate.read_text())
        _until(lambda: {_served(port) for port in ports} == {after})
        first.key.write_bytes(key)
        collector.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert {_served(port) for port in ports} == {after}
        collector.terminate()
        assert collector.process.stderr is not None
        assert collector.process.stderr.read().count("cannot reload") == 2


def test_no_handshake_fails_while_certificates_are_reloaded(tmp_path: Path) -> None:
    first = make_certificate(tmp_path)
    arguments = ("--tls-cert", str(first.certificate), "--tls-key", str(first.key))
    with running(tmp_path / "spans.duckdb", *arguments, http=ANY_PORT) as collector:
        port = str(collector.address.http).rpartition(":")[2]
        served = set()
        for _ in range(6):
            make_certificate(tmp_path)
            collector.process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + 0.3
            while time.monotonic() < deadline:
                served.add(_served(port))
        assert len(served) > 3


def _addresses(collector: CollectorProcess) -> list[str]:
    return [str(collector.address.grpc), str(collector.address.http), collector.address.flight]


def _served(port: str) -> bytes | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", int(port)), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return connection.getpeercert(binary_form=True)


@pytest.mark.ci
def test_without_tokens_and_certificates_it_ends_as_on_sigterm(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store, load_interval_s=30) as collector:
        export(collector.address, span(1, 1))
        collector.process.send_signal(signal.SIGHUP)
        assert collector.process.wait(60) == 0
    with running(store) as collector:
        assert len(read(collector.address, "spans")) == 1
