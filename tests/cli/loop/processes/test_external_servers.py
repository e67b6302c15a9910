"""Policy servers that others started, at the beginning of a run."""

from pathlib import Path

import pytest

from tests.training.support.swap_server import policy_server
from trainspan_cli.clients.policy_servers import PolicyServers
from trainspan_cli.loop.processes.external_servers import bring_up_to_date, check_external, wait_for_servers
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, checkpoint_name, write_latest
from trainspan_schemas.config.load import load_settings
from trainspan_schemas.errors import ConfigError, ProcessError


def test_a_run_without_checkpoints_begins_only_with_servers_of_version_0(tmp_path: Path) -> None:
    with policy_server() as one, policy_server() as two:
        one.state = two.state = {"version": 0}
        servers = PolicyServers([one.url, two.url])
        bring_up_to_date(servers, tmp_path, [None], 1)
        two.state = {"version": 7}
        with pytest.raises(ConfigError, match=f"{two.url} serves version 7 of another run: restart it"):
            bring_up_to_date(servers, tmp_path, [None], 1)
        assert not one.asked
        assert not two.asked


def test_a_run_that_goes_on_swaps_its_newest_checkpoint_in_where_it_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    (tmp_path / "token").write_text("secret\n")
    name = checkpoint_name(2)
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    CheckpointMeta("full", 2, checkpoint_name(1), "model", None).write(tmp_path / "checkpoints" / name)
    write_latest(tmp_path / "checkpoints", name)
    swapped = (200, {"version": 2, "checkpoint": name, "canary": {"status": "fresh"}})
    with policy_server(swapped) as one, policy_server(swapped) as two:
        one.state, two.state = {"version": 2, "checkpoint": name}, {"version": 0, "checkpoint": "model"}
        bring_up_to_date(PolicyServers([one.url, two.url]), tmp_path / "checkpoints", [None], 1)
        assert not one.asked
        (request,) = two.asked
        assert (request[0], request[2]) == ("/trainspan/policy", {"checkpoint": name, "version": 2})
        two.answers = [(409, {"error": "it does not fit", "reason": "canary_failed"})]
        with pytest.raises(ProcessError, match=f"{two.url} does not take {name}: it does not fit"):
            bring_up_to_date(PolicyServers([two.url]), tmp_path / "checkpoints", [None], 1)


def test_servers_that_never_answer_are_named() -> None:
    with pytest.raises(ProcessError, match=r"no policy server was ready after 0 s: http://127\.0\.0\.1:1"):
        wait_for_servers(PolicyServers(["http://127.0.0.1:1"]), 0)


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("TRAINSPAN_SERVING__SLEEP", "true", r"\[serving\] sleep"),
        ("TRAINSPAN_LOOP__SERVER_FLAGS", "--max-num-seqs 8", r"\[loop\] server_flags"),
        ("TRAINSPAN_LOOP__SERVER_DEVICES", "0", r"\[loop\] server_devices"),
    ],
)
def test_settings_of_a_server_that_the_loop_would_start_are_refused(variable: str, value: str, name: str) -> None:
    check_external(load_settings(None, {variable: value}))
    external = {"TRAINSPAN_ROLLOUTS__POLICY_SERVERS": "http://127.0.0.1:1", variable: value}
    with pytest.raises(ConfigError, match=f"{name} has no effect with"):
        check_external(load_settings(None, external))
