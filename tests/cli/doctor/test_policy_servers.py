"""Several policy servers in `trainspan status` and `trainspan doctor`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.swap_server import policy_server
from trainspan_cli.commands.status import status
from trainspan_cli.doctor.finding import Finding
from trainspan_cli.doctor.processes import process_findings
from trainspan_schemas.config.load import load_settings

AWAY = "http://127.0.0.1:1"


def state(version: int) -> dict[str, Any]:
    counts = {f"calls_{name}": 0 for name in ("captured", "exported", "dropped", "refused", "spooled")}
    return {"version": version, "policies": {}, "in_flight": 2, "export_trouble": None, **counts}


def findings(*urls: str) -> list[Finding]:
    settings = load_settings(None, {"TRAINSPAN_ROLLOUTS__POLICY_SERVERS": ",".join(urls)})
    return [finding for finding in process_findings(settings) if finding.subject == "policy server"]


def test_doctor_names_servers_that_are_away_or_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    with policy_server() as one, policy_server() as two:
        one.state, two.state = state(4), state(4)
        assert [finding.level for finding in findings(one.url, two.url)] == ["ok", "ok"]
        two.state = state(3)
        found = findings(one.url, two.url, AWAY)
    assert [finding.level for finding in found] == ["ok", "ok", "problem", "problem"]
    assert found[0].detail == f"version 4, 0 calls captured, 0 dropped, 0 refused, 0 spooled, at {one.url}"
    assert found[2].detail == f"no answer at {AWAY}"
    assert found[3].detail == "the policy servers serve different versions: version 3; version 4"


def test_status_has_a_line_for_each_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with policy_server() as one:
        one.state = state(4)
        monkeypatch.setenv("TRAINSPAN_ROLLOUTS__POLICY_SERVERS", f"{one.url},{AWAY}")
        status()
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("policy")]
        assert lines == [f"policy      version 4, 2 in flight at {one.url}", f"policy      not running at {AWAY}"]
        status(format="json")
    servers = json.loads(capsys.readouterr().out)["policy_servers"]
    (here, away) = servers
    assert (here["url"], here["versions"], here["state"]["version"]) == (one.url, "version 4", 4)
    assert away == {"url": AWAY, "state": None}
