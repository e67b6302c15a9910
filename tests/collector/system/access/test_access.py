"""Role tokens and TLS on every listener: OTLP over gRPC and HTTP, Flight, health and metrics."""

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from pyarrow import flight

from tests.support.collector.process import (
    ANY_PORT,
    METRICS,
    TRACES,
    CollectorProcess,
    event,
    key_values,
    running,
    span,
    span_id,
    spawn_collector,
    trace_id,
    trace_request,
)
from tests.support.otlp.http import request
from tests.support.tls import Certificate, make_certificate
from trainspan_collector.network.access import Access, DeniedError, Right, Role
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.store.access import open_store
from trainspan_schemas.store.endpoint import StoreEndpoint, headers_of
from trainspan_schemas.telemetry import keys

TOKENS = {role: f"{role}-token-{'x' * 20}" for role in Role}
HEALTH = "/grpc.health.v1.Health/Check"


def _token_file(folder: Path) -> Path:
    path = folder / "tokens.toml"
    path.write_text("".join(f'{role} = "{token}"\n' for role, token in TOKENS.items()))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    with running(folder / "s.duckdb", "--token-file", str(_token_file(folder)), http=ANY_PORT) as started:
        yield started


def _bearer(token: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token is not None else {}


def _shown(token: str | None) -> dict[str, str | None]:
    """Headers of an HTTP request with this token; by default a request uses the address file's."""
    return {"authorization": None, **_bearer(token)}


def _grpc_code(collector: CollectorProcess, method: str, token: str | None, body: bytes = b"") -> grpc.StatusCode:
    with grpc.insecure_channel(str(collector.address.grpc)) as channel:
        try:
            channel.unary_unary(method)(body, timeout=10, metadata=tuple(_bearer(token).items()))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def _flight(collector: CollectorProcess, sql: str, token: str | None) -> list[dict[str, Any]]:
    headers = [(name.encode(), value.encode()) for name, value in _bearer(token).items()]
    with flight.connect(f"grpc://{collector.address.flight}") as client:
        options = flight.FlightCallOptions(headers=headers)
        rows: list[dict[str, Any]] = (
            client.do_get(flight.Ticket(json.dumps({"sql": sql}).encode()), options).read_all().to_pylist()
        )
    return rows


OK, NO, WHO = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("token", "write", "read"),
    [
        (TOKENS[Role.AGENT], OK, NO),
        (TOKENS[Role.SERVING], OK, NO),
        (TOKENS[Role.RUNNER], OK, OK),
        (TOKENS[Role.READER], NO, OK),
        ("wrong" * 5, WHO, WHO),
        ("", WHO, WHO),
        (None, WHO, WHO),
    ],
)
def test_each_role_may_do_its_part_on_every_listener(
    guarded: CollectorProcess, token: str | None, write: grpc.StatusCode, read: grpc.StatusCode
) -> None:
    http_status = {OK: 200, NO: 403, WHO: 401}
    grpc_of_status = {200: 0, 403: 7, 401: 16}
    for method in (TRACES, METRICS):
        assert _grpc_code(guarded, method, token) == write
    assert _grpc_code(guarded, HEALTH, token) == OK
    for path, method, expected in (
        ("/v1/traces", "POST", write),
        ("/metrics", "GET", read),
        ("/healthz", "GET", OK),
        ("/readyz", "GET", OK),
    ):
        answer = request(guarded.address, path, b"", method=method, headers=_shown(token))
        assert answer.status == http_status[expected], path
        if expected != OK:
            assert answer.error.code == grpc_of_status[answer.status]
            assert answer.headers.get("www-authenticate") == ("Bearer" if expected == WHO else None)
    failure = {NO: flight.FlightUnauthorizedError, WHO: flight.FlightUnauthenticatedError}
    if read == OK:
        assert _flight(guarded, "SELECT 1 AS one", token) == [{"one": 1}]
    else:
        with pytest.raises(failure[read]):
            _flight(guarded, "SELECT 1 AS one", token)


def test_a_token_is_asked_for_before_a_body_is_read(guarded: CollectorProcess) -> None:
    never = threading.Event()

    def nothing() -> Iterator[bytes]:
        never.wait(20)
        yield b""

    with grpc.insecure_channel(str(guarded.address.grpc), [("grpc.max_send_message_length", -1)]) as channel:
        for call in (
            lambda: channel.stream_unary(TRACES)(nothing(), timeout=10),
            lambda: channel.unary_unary(TRACES)(bytes(65 * 2**20), timeout=10),  # not "too large"
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() == WHO
    never.set()
    stated = {**_shown(None), "Content-Length": "1000"}
    assert request(guarded.address, "/v1/traces", None, headers=stated, timeout_s=10).status == 401


def test_a_refusal_never_repeats_the_token(guarded: CollectorProcess) -> None:
    answer = request(guarded.address, "/v1/traces", b"", headers=_bearer("my-secret-guess-of-a-token"))
    assert b"guess" not in answer.body


def test_other_schemes_than_bearer_are_refused_and_its_case_does_not_matter(guarded: CollectorProcess) -> None:
    for value, status in (
        (f"Basic {TOKENS[Role.AGENT]}", 401),
        (TOKENS[Role.AGENT], 401),
        (f"bearer {TOKENS[Role.AGENT]}", 200),
        (f"Bearer  {TOKENS[Role.AGENT]} ", 200),
    ):
        assert request(guarded.address, "/v1/traces", b"", headers={"Authorization": value}).status == status


def test_what_an_agent_says_of_rewards_and_identity_is_kept_and_marked(guarded: CollectorProcess) -> None:
    identity = {keys.ROLLOUT_ID: "r-1", keys.TASK_ID: "t", keys.ATTEMPT: 0}
    judged = {keys.ROLLOUT_STATUS: "ok", keys.ROLLOUT_BOUNDARY: "runner", keys.ROLLOUT_JUDGE: "m:f"}
    reward = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SOURCE: "judge"}
    tokens = {keys.PROMPT_TOKEN_IDS: b"\1\0\0\0", keys.COMPLETION_TOKEN_IDS: b"\2\0\0\0"}

    def send(role: Role, *spans: Any) -> None:
        body = trace_request(*spans).SerializeToString()
        assert request(guarded.address, "/v1/traces", body, headers=_bearer(TOKENS[role])).status == 200

    pays_itself = event(keys.EVALUATION_EVENT, {**reward, keys.EVALUATION_SCORE: 100.0})
    # The agent's copy of the runner's span arrives first, is larger, and claims another task.
    forged = {**identity, **judged, keys.TASK_ID: "easier", "padding": "x" * 1_000}
    send(Role.AGENT, span(7, 1, forged, events=[pays_itself]), span(7, 3, {**identity, **tokens}))
    send(Role.SERVING, span(7, 2, {**identity, **tokens}))
    verdict = event(keys.EVALUATION_EVENT, {**reward, keys.EVALUATION_SCORE: 0.25})
    send(Role.RUNNER, span(7, 1, {**identity, **judged}, events=[verdict]))

    def rows(view: str, columns: str, order: str) -> list[tuple[Any, ...]]:
        sql = f"SELECT {columns} FROM {view} WHERE trace_id = '{trace_id(7).hex()}' ORDER BY {order}"
        return [tuple(row.values()) for row in _flight(guarded, sql, TOKENS[Role.READER])]

    assert rows("spans", "span_id, untrusted", "span_id") == [
        (span_id(1).hex(), False), (span_id(2).hex(), False), (span_id(3).hex(), True),
    ]  # fmt: skip
    assert rows("calls", "span_id, untrusted", "span_id") == [(span_id(2).hex(), False), (span_id(3).hex(), True)]
    assert rows("evaluations", "score, untrusted", "score") == [(0.25, False), (100.0, True)]
    assert rows("rollouts", "task_id, reward, untrusted", "rollout_id") == [("t", 0.25, False)]


def test_an_agents_evaluation_is_no_reward_of_a_rollout_without_a_judge_either(guarded: CollectorProcess) -> None:
    identity = {keys.ROLLOUT_ID: "r-2", keys.ATTEMPT: 0}
    own = {**identity, keys.ROLLOUT_STATUS: "ok", keys.ROLLOUT_BOUNDARY: "runner"}
    reward = event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0})
    paid = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1000.0, keys.EVALUATION_OF: "rollout"}
    for role, sent in (
        (Role.RUNNER, span(10, 1, own, events=[reward])),
        (Role.AGENT, span(10, 2, identity, events=[event(keys.EVALUATION_EVENT, paid)])),
    ):
        body = trace_request(sent).SerializeToString()
        assert request(guarded.address, "/v1/traces", body, headers=_bearer(TOKENS[role])).status == 200
    found = _flight(guarded, "SELECT reward FROM rollouts WHERE rollout_id = 'r-2'", TOKENS[Role.READER])
    assert found == [{"reward": 1.0}]


def test_log_records_are_marked_and_an_agents_copy_does_not_stand_in_for_a_trusted_one(
    guarded: CollectorProcess,
) -> None:
    logs = ExportLogsServiceRequest()
    said = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0, keys.EVALUATION_ID: "e-1"}
    logs.resource_logs.add().scope_logs.add().log_records.add(
        time_unix_nano=5, event_name=keys.EVALUATION_EVENT, attributes=key_values(said)
    )
    for role in (Role.AGENT, Role.RUNNER, Role.AGENT, Role.RUNNER):
        body = logs.SerializeToString()
        assert request(guarded.address, "/v1/logs", body, headers=_bearer(TOKENS[role])).status == 200
    token = TOKENS[Role.READER]
    records = "SELECT untrusted FROM logs WHERE contains(attributes, 'e-1') ORDER BY ALL"
    assert _flight(guarded, records, token) == [{"untrusted": False}, {"untrusted": True}]
    evaluations = "SELECT untrusted FROM evaluations WHERE time_ns = 5"
    assert _flight(guarded, evaluations, token) == [{"untrusted": False}]


def test_commands_of_the_same_user_read_by_the_stores_path_without_a_token_of_their_own(
    guarded: CollectorProcess,
) -> None:
    assert oct(Path(f"{guarded.store}.json").stat().st_mode & 0o777) == "0o600"
    done = _sql(guarded.store, {})
    assert (done.returncode, done.stdout) == (0, '{"one": 1}\n'), done.stderr


def test_a_reader_of_a_remote_store_takes_its_token_from_the_exporters_variable(
    guarded: CollectorProcess, tmp_path: Path
) -> None:
    address, home = f"grpc://{guarded.address.flight}", {"TRAINSPAN_HOME": str(tmp_path)}
    header = {"OTEL_EXPORTER_OTLP_HEADERS": f"x=y,Authorization=Bearer%20{TOKENS[Role.READER]}"}
    done = _sql(address, home | header)
    assert (done.returncode, done.stdout) == (0, '{"one": 1}\n'), done.stderr
    refused = _sql(address, home)
    assert refused.returncode == 1
    assert "send the header authorization: Bearer TOKEN" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def _sql(store: object, environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "trainspan_cli",
        "sql",
        "--store",
        str(store),
        "--format",
        "json",
        "SELECT 1 AS one",
    ]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, certificate: Certificate) -> Iterator[CollectorProcess]:
    """A collector reachable from everywhere: tokens and TLS together allow that."""
    folder = tmp_path_factory.mktemp("encrypted")
    tls = ("--tls-cert", str(certificate.certificate), "--tls-key", str(certificate.key))
    tokens = ("--token-file", str(_token_file(folder)))
    with running(folder / "s.duckdb", *tls, *tokens, "--grpc", "0.0.0.0:0", "--http", "0.0.0.0:0") as started:
        yield started


def test_tls_covers_grpc_http_and_flight_and_plain_connections_get_nowhere(
    encrypted: CollectorProcess, certificate: Certificate
) -> None:
    address = encrypted.address
    assert address.tls
    grpc_port = str(address.grpc).rpartition(":")[2]
    exporter = OTLPSpanExporter(
        endpoint=f"https://localhost:{grpc_port}",
        credentials=grpc.ssl_channel_credentials(certificate.pem),
        headers=_bearer(TOKENS[Role.RUNNER]),
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("t").start_as_current_span("over TLS"):
        pass
    provider.shutdown()
    trust = ssl.create_default_context(cadata=certificate.pem.decode())
    body = trace_request(span(9, 1, name="over HTTPS")).SerializeToString()
    answer = request(address, "/v1/traces", body, headers=_bearer(TOKENS[Role.AGENT]), tls=trust)
    assert answer.status == 200
    remote = StoreEndpoint.of_address(
        f"grpc+tls://localhost:{address.flight.rpartition(':')[2]}",
        {
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {TOKENS[Role.READER]}",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificate.certificate),
        },
    )
    with open_store(str(encrypted.store)) as local:
        for endpoint in (remote, local):
            with flight.connect(endpoint.location, **endpoint.connect_options) as client:
                ticket = flight.Ticket(b'{"sql": "SELECT name FROM spans ORDER BY name"}')
                table = client.do_get(ticket, flight.FlightCallOptions(headers=endpoint.call_headers)).read_all()
            assert table["name"].to_pylist() == ["over HTTPS", "over TLS"]
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as plain, pytest.raises(grpc.RpcError) as caught:
        plain.unary_unary(TRACES)(b"", timeout=3)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(OSError, match=r"^(?!.*timed out)"):
        request(address, "/v1/traces", body)
    with pytest.raises(flight.FlightUnavailableError), flight.connect(f"grpc://{address.flight}") as client:
        client.do_get(flight.Ticket(b'{"sql": "SELECT 1"}'), flight.FlightCallOptions(timeout=3)).read_all()


def test_a_certificate_that_is_not_trusted_is_not_spoken_to(encrypted: CollectorProcess, tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "other")
    trust = ssl.create_default_context(cadata=other.pem.decode())
    with pytest.raises(ssl.SSLCertVerificationError):
        request(encrypted.address, "/v1/traces", b"", headers=_bearer(TOKENS[Role.AGENT]), tls=trust)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ('agent = "aaaaaaaaaaaaaaaaaaaa"', 0o644, "can be read by others: chmod 600"),
        ('boss = "aaaaaaaaaaaaaaaaaaaa"', 0o600, "unknown role 'boss'; roles are agent, serving, runner, reader"),
        ('agent = "short"', 0o600, "the token of agent is not a string of 16 or more ASCII characters"),
        ("agent = 12345678901234567890", 0o600, "is not a string"),
        ('agent = "has a space in the middle"', 0o600, "without spaces"),
        (
            'agent = ["aaaaaaaaaaaaaaaaaaaa"]\nreader = "aaaaaaaaaaaaaaaaaaaa"',
            0o600,
            "reader and agent have the same token",
        ),
        ("agent: token", 0o600, "is not TOML"),
        ("", 0o600, "has no token"),
        (None, 0o600, "cannot be read: No such file"),
    ],
)
def test_a_token_file_that_cannot_be_meant_is_refused_by_name(
    tmp_path: Path, text: str | None, mode: int, said: str
) -> None:
    path = tmp_path / "tokens.toml"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        Access.from_file(path)
    assert "aaaaaaaa" not in str(caught.value)


def test_a_role_may_have_an_old_and_a_new_token_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(f'reader = ["{"o" * 16}", "{"n" * 16}"]')
    path.chmod(0o600)
    access = Access.from_file(path)
    for token in ("o" * 16, "n" * 16):
        assert access.authorize(Right.READ, f"Bearer {token}") is Role.READER
        assert access.authorize(Right.READ, f"Bearer%20{token}") is Role.READER
    with pytest.raises(DeniedError, match="may not send telemetry; these may: agent, runner, serving"):
        access.authorize(Right.WRITE, f"Bearer {'n' * 16}")


@pytest.mark.ci
@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("with_tls", [False, True])
@pytest.mark.parametrize("option", ["--grpc", "--http", "--flight"])
def test_an_address_that_others_can_reach_needs_both_tokens_and_tls(
    tmp_path: Path, certificate: Certificate, option: str, with_tls: bool, with_tokens: bool
) -> None:
    arguments = [option, "0.0.0.0:0"]
    if with_tls:
        arguments += ["--tls-cert", str(certificate.certificate), "--tls-key", str(certificate.key)]
    if with_tokens:
        arguments += ["--token-file", str(_token_file(tmp_path))]
    if with_tls and with_tokens:
        with running(tmp_path / "s.duckdb", *arguments) as started:
            assert "0.0.0.0" in str(started.address)
        return
    process = spawn_collector(tmp_path / "s.duckdb", *arguments)
    _, text = process.communicate(timeout=30)
    assert process.returncode == 2
    [line] = text.splitlines()
    assert "could be reached from other machines" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tls-cert", "c.pem"], "TLS needs both --tls-cert and --tls-key"),
        (
            ["--tls-cert", "/nonexistent/c.pem", "--tls-key", "/nonexistent/k.pem"],
            "are not a PEM certificate with its key",
        ),
    ],
)
def test_half_of_a_certificate_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    process = spawn_collector(tmp_path / "s.duckdb", *arguments)
    _, text = process.communicate(timeout=30)
    assert (process.returncode, len(text.splitlines())) == (2, 1)
    assert said in text


def test_headers_are_read_as_exporters_read_them() -> None:
    assert headers_of("Authorization=Bearer%20abc%3D, x = y ,broken,empty=") == {
        "authorization": "Bearer abc=",
        "x": "y",
        "empty": "",
    }
