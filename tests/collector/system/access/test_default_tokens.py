"""A collector without configuration: what a process without a token can do, and what each role is trusted with."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from pyarrow import flight

from tests.support.collector.process import (
    ANY_PORT,
    LOGS,
    METRICS,
    TRACES,
    CollectorProcess,
    event,
    key_values,
    open_channel,
    running,
    select,
    span,
    span_id,
    trace_id,
    trace_request,
)
from tests.support.otlp.http import request
from trainspan_schemas.store.roles import Role, token_of
from trainspan_schemas.telemetry import keys

NOBODY = {"authorization": None}
REWARD = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 100.0}
JUDGED = {**REWARD, keys.EVALUATION_SOURCE: "judge"}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    with running(tmp_path_factory.mktemp("home") / "state" / "spans.duckdb", http=ANY_PORT) as started:
        yield started


def _token(collector: CollectorProcess, role: str) -> str:
    """The role's token from the collector's file; "" for no role."""
    return token_of(str(collector.address.token_file), role) if role else ""


def _send(collector: CollectorProcess, role: str, *spans: Any) -> None:
    with open_channel(collector.address, token=_token(collector, role)) as channel:
        channel.unary_unary(TRACES)(trace_request(*spans).SerializeToString(), timeout=10)


def _send_record(collector: CollectorProcess, role: str, attributes: dict[str, Any], **ids: bytes) -> None:
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add(
        time_unix_nano=5, event_name=keys.EVALUATION_EVENT, attributes=key_values(attributes), **ids
    )
    with open_channel(collector.address, token=_token(collector, role)) as channel:
        channel.unary_unary(LOGS)(logs.SerializeToString(), timeout=10)


def _rollout(name: str, **more: Any) -> dict[str, Any]:
    return {keys.ROLLOUT_ID: name, keys.ATTEMPT: 0, keys.ROLLOUT_STATUS: "ok", keys.ROLLOUT_BOUNDARY: "runner", **more}


def _reward(collector: CollectorProcess, name: str) -> float | None:
    [(reward,)] = select(collector.address, f"SELECT reward FROM rollouts WHERE rollout_id = '{name}'")
    return reward


def test_the_tokens_are_in_a_file_that_only_its_user_reads(collector: CollectorProcess) -> None:
    path = Path(str(collector.address.token_file))
    assert path == collector.store.parent / "tokens.toml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len({_token(collector, role) for role in Role}) == len(Role)


def test_processes_that_make_the_file_at_the_same_time_agree_on_it(tmp_path: Path) -> None:
    program = "from trainspan_schemas.store.roles import *; print(make_home_token_file().read_text())"
    environ = {**os.environ, "TRAINSPAN_HOME": str(tmp_path / "a" / "home")}
    made = [
        subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    assert len({process.communicate(timeout=30)[0] for process in made}) == 1
    assert {process.returncode for process in made} == {0}
    assert [path.name for path in (tmp_path / "a" / "home").iterdir()] == ["tokens.toml"]


def test_without_a_token_no_client_reads_or_does_upkeep(collector: CollectorProcess) -> None:
    for headers in ([], [(b"authorization", b"Bearer made-up-made-up-made-up")]):
        options = flight.FlightCallOptions(headers=headers)
        with flight.connect(f"grpc://{collector.address.flight}") as client:
            for ticket in ({"sql": "SELECT 1"}, {"read": "spans"}):
                with pytest.raises(flight.FlightUnauthenticatedError):
                    client.do_get(flight.Ticket(json.dumps(ticket).encode()), options).read_all()
            for action in ("purge", "compact", "verify", "backlog"):
                with pytest.raises(flight.FlightUnauthenticatedError):
                    list(client.do_action(flight.Action(action, b"{}"), options))
    assert request(collector.address, "/metrics", method="GET", headers=NOBODY).status == 401
    for path in ("/healthz", "/readyz"):
        assert request(collector.address, path, method="GET", headers=NOBODY).status == 200


def test_an_agents_or_a_readers_token_opens_no_more_than_its_role(collector: CollectorProcess) -> None:
    denied = flight.FlightUnauthorizedError
    with flight.connect(f"grpc://{collector.address.flight}") as client:
        for role, reads, purges in (("agent", False, False), ("serving", False, False), ("user", False, False),
                                    ("reader", True, False)):  # fmt: skip
            options = flight.FlightCallOptions(
                headers=[(b"authorization", f"Bearer {_token(collector, role)}".encode())]
            )
            assert purges is False
            with pytest.raises(denied):
                list(client.do_action(flight.Action("purge", b'{"trace_ids": []}'), options))
            if reads:
                client.do_get(flight.Ticket(b'{"sql": "SELECT 1"}'), options).read_all()
                continue
            with pytest.raises(denied):
                client.do_get(flight.Ticket(b'{"sql": "SELECT 1"}'), options).read_all()


def test_who_sends_without_a_token_is_an_agent_and_a_wrong_token_is_refused(collector: CollectorProcess) -> None:
    body = trace_request(span(1, 1)).SerializeToString()
    for method in (TRACES, METRICS):
        with open_channel(collector.address, token="") as channel:
            channel.unary_unary(method)(body if method == TRACES else b"", timeout=10)
        with (
            open_channel(collector.address, token="made-up-made-up-made-up") as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            channel.unary_unary(method)(b"", timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    over_http = trace_request(span(1, 2)).SerializeToString()
    assert request(collector.address, "/v1/traces", over_http, headers=NOBODY).status == 200
    wrong = {"authorization": "Bearer made-up-made-up-made-up"}
    assert request(collector.address, "/v1/traces", over_http, headers=wrong).status == 401
    sql = f"SELECT untrusted FROM spans WHERE trace_id = '{trace_id(1).hex()}'"
    assert select(collector.address, sql) == [(True,), (True,)]


@pytest.mark.parametrize("role", ["", "agent", "serving", "user"])
def test_no_one_but_the_runner_gives_a_judges_verdict(collector: CollectorProcess, role: str) -> None:
    """Not on its own span, on one with the ids of the runner's span, as a record, or with a rollout span."""
    number, name = 10 + len(role), f"judged-{role}"
    forged = _rollout(name, **{keys.ROLLOUT_JUDGE: "m:f", "padding": "x" * 2_000})
    _send(collector, role, span(number, 1, forged, events=[event(keys.EVALUATION_EVENT, JUDGED)]))
    _send(collector, role, span(number, 2, forged, events=[event(keys.EVALUATION_EVENT, JUDGED)]))
    plain = {keys.ROLLOUT_ID: name, keys.ATTEMPT: 0}
    verdict = event(keys.EVALUATION_EVENT, {**JUDGED, keys.EVALUATION_SCORE: 0.0}, 1_600)
    _send(collector, "runner", span(number, 1, _rollout(name, **{keys.ROLLOUT_JUDGE: "m:f"}), events=[verdict]))
    later = event(keys.EVALUATION_EVENT, JUDGED, 1_700)
    _send(collector, role, span(number, 1, {**plain, "padding": "x" * 9_000}, events=[later]))
    _send_record(collector, role, {**JUDGED, **plain}, trace_id=trace_id(number), span_id=span_id(1))
    assert _reward(collector, name) == 0.0


@pytest.mark.parametrize(("role", "counts"), [("", False), ("agent", False), ("serving", False), ("user", True)])
def test_whose_reward_counts_for_a_rollout_that_no_judge_judges(
    collector: CollectorProcess, role: str, counts: bool
) -> None:
    number, name = 30 + len(role), f"free-{role}"
    _send(collector, "runner", span(number, 1, _rollout(name)))
    _send_record(collector, role, {**REWARD, keys.ROLLOUT_ID: name, keys.EVALUATION_SOURCE: "human"})
    assert _reward(collector, name) == (100.0 if counts else None)


def test_an_agents_own_reward_counts_only_within_the_trace_that_its_runner_handed_to_it(
    collector: CollectorProcess,
) -> None:
    left = {keys.ROLLOUT_OWN_REWARD: True}
    for number, name in ((40, "own"), (41, "victim"), (42, "not-left")):
        _send(collector, "runner", span(number, 1, _rollout(name, **(left if number < 42 else {}))))
    own = event(keys.EVALUATION_EVENT, {**REWARD, keys.EVALUATION_SCORE: 0.5, keys.EVALUATION_OF: "rollout"})
    _send(collector, "", span(40, 2, {keys.ROLLOUT_ID: "own", keys.ATTEMPT: 0}, events=[own]))
    # The agent of "own" names its victim: in its own trace, without one, and with a rollout span that lets it reward.
    paid = {**REWARD, keys.ROLLOUT_ID: "victim", keys.ATTEMPT: 0, keys.EVALUATION_OF: "rollout"}
    _send(collector, "", span(40, 3, paid, events=[event(keys.EVALUATION_EVENT, paid, 1_700)]))
    _send_record(collector, "", paid)
    _send_record(collector, "", paid, trace_id=trace_id(40), span_id=span_id(2))
    _send(
        collector, "agent", span(43, 1, _rollout("victim", **left), events=[event(keys.EVALUATION_EVENT, paid, 1_800)])
    )
    inside = {**REWARD, keys.EVALUATION_OF: "rollout"}
    _send(collector, "", span(42, 2, {keys.ROLLOUT_ID: "not-left"}, events=[event(keys.EVALUATION_EVENT, inside)]))
    assert [_reward(collector, name) for name in ("own", "victim", "not-left")] == [0.5, None, None]


def test_a_page_in_a_browser_cannot_send_by_a_name_of_its_own(collector: CollectorProcess) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert request(collector.address, "/v1/traces", b"", headers={**NOBODY, **headers}).status == 403


@pytest.mark.parametrize("address", [False, True])
def test_the_users_commands_read_and_purge_without_a_setting(
    collector: CollectorProcess, tmp_path: Path, address: bool
) -> None:
    """By the store's path, from any folder, and by its address, with the same state folder."""
    place = f"grpc://{collector.address.flight}" if address else str(collector.store)
    environ = {**os.environ, "TRAINSPAN_HOME": str(collector.store.parent if address else tmp_path)}
    for command in (["sql", "--format", "csv", "SELECT 1 AS one"], ["store", "purge", "--trace", "f" * 32]):
        done = subprocess.run(
            [sys.executable, "-m", "trainspan_cli", *command, "--store", place],
            env=environ, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_a_custom_token_file_admits_no_client_without_a_token(tmp_path: Path) -> None:
    tokens = tmp_path / "own.toml"
    tokens.write_text(f'runner = "{"r" * 20}"\n')
    tokens.chmod(0o600)
    with running(tmp_path / "home" / "s.duckdb", "--token-file", str(tokens), http=ANY_PORT) as strict:
        assert strict.address.token_file == str(tokens)
        assert not (tmp_path / "home" / "tokens.toml").exists()
        assert request(strict.address, "/v1/traces", b"", headers=NOBODY).status == 401
        own = {"authorization": f"Bearer {'r' * 20}"}
        assert request(strict.address, "/v1/traces", b"", headers=own).status == 200
