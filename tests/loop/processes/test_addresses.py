"""The addresses of a project's processes: what answers there must be its own."""

import os
import socket
from pathlib import Path

import pytest

from tests.training.support.swap_server import policy_server
from trainspan_cli.doctor.processes import process_findings
from trainspan_cli.main import run
from trainspan_loop.addresses import check_ports, policy_servers_of, with_server_port
from trainspan_schemas.config.load import load_settings
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ProcessError
from trainspan_schemas.home import remember_server, token
from trainspan_schemas.store.access import StoreAddress, write_address

STATE = {"version": 3}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder, which has a token."""
    for name in [name for name in os.environ if name.startswith(("TRAINSPAN_", "OTEL_", "OPENAI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    token()
    return tmp_path / "home"


def at(monkeypatch: pytest.MonkeyPatch, collector: int, server: int) -> Settings:
    """The settings, for commands too, of processes at these ports."""
    monkeypatch.setenv("TRAINSPAN_PORTS__BASE", "0")  # others may be at the default ports
    monkeypatch.setenv("TRAINSPAN_COLLECTOR__GRPC", f"127.0.0.1:{collector}")
    monkeypatch.setenv("TRAINSPAN_SERVING__PORT", str(server))
    return load_settings(None, os.environ)


@pytest.mark.ci
def test_another_state_folders_processes_are_refused_by_every_command_that_would_use_them(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "1", "input": "x"}\n')
    with socket.create_server(("127.0.0.1", 0)) as collector, policy_server() as server:
        port, other = collector.getsockname()[1], int(server.url.rpartition(":")[2])
        server.state = {**STATE, "token_digest": "another"}
        settings = at(monkeypatch, port, other)
        holder = f"pid {os.getpid()} ("
        foreign = (
            f"what listens at http://127.0.0.1:{port} is not the collector of {state / 'spans.duckdb'} but {holder}"
        )
        for words in (["serve", "no-model"], ["rollout", "--tasks", "tasks.jsonl", "agent.py:solve"]):
            assert run(words) == 2
            assert capsys.readouterr().err.startswith(f"trainspan: {foreign}")
        strange = f"the policy server at {server.url} is not that of {state} but of {holder}"
        collectors = ["--collector", "http://127.0.0.1:1"]
        for words in (["train", "--model", "m"], ["rollout", "--tasks", "tasks.jsonl", *collectors, "agent.py:solve"]):
            assert run(words) == 2
            told = capsys.readouterr().err
            assert told.startswith(f"trainspan: {strange}")
            assert told.endswith(": stop it, or take other ports with --set ports.base=0 or TRAINSPAN_PORTS__BASE=0\n")
        findings = process_findings(settings)
    assert [(finding.level, finding.subject) for finding in findings] == [
        ("problem", "collector"),
        ("problem", "policy server"),
    ]
    assert findings[0].detail.startswith(foreign)
    assert findings[1].detail.startswith(strange)
    assert {finding.advice for finding in findings} == {
        "stop it, or take other ports with --set ports.base=0 or TRAINSPAN_PORTS__BASE=0"
    }


def test_the_state_folders_own_processes_are_found_in_order(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector, policy_server() as server:
        port, other = collector.getsockname()[1], int(server.url.rpartition(":")[2])
        server.state = dict(STATE)
        own = write_address(StoreAddress(1, str(state / "spans.duckdb"), f"127.0.0.1:{port}", None, "127.0.0.1:1"))
        findings = process_findings(at(monkeypatch, port, other))
        os.close(own)
    assert [finding.level for finding in findings] == ["ok", "ok"]


def test_the_loop_names_all_ports_in_use_before_it_starts_anything(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [listener.getsockname()[1] for listener in (one, two)]
        settings = at(monkeypatch, *ports)
        with pytest.raises(ProcessError) as caught:
            check_ports(settings, wait_s=0)
    for name, port in (("[collector] grpc", ports[0]), ("[serving] port", ports[1])):
        assert f"{name} 127.0.0.1:{port} is in use by pid {os.getpid()} (" in str(caught.value)
    check_ports(settings, wait_s=0)


def test_a_server_at_any_free_port_keeps_the_last_one(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_PORTS__BASE", "0")
    settings = load_settings(None, os.environ)
    assert policy_servers_of(settings) == ()
    chosen = with_server_port(settings)
    (url,) = policy_servers_of(chosen)
    assert chosen.rollouts.policy_url == f"{url}/v1"
    remember_server("model", url)
    assert policy_servers_of(load_settings(None, os.environ)) == (url,)
    assert with_server_port(load_settings(None, os.environ)).serving.port == chosen.serving.port
    with socket.create_server(("127.0.0.1", chosen.serving.port)):
        assert with_server_port(settings).serving.port != chosen.serving.port


@pytest.mark.parametrize(
    "command",
    ["rollout --tasks tasks.jsonl --collector http://127.0.0.1:9 agent.py:solve", "train --model m --dataset d"],
)
def test_without_a_known_server_the_error_names_the_ways_to_give_one_or_do_without(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("TRAINSPAN_PORTS__BASE", "0")
    assert run(command.split()) == 2
    assert "its URL, or none for agents that ask another model (policy_url, --policy-url)" in capsys.readouterr().err
