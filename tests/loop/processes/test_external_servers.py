"""Policy servers that others started, at the beginning of a run."""

from pathlib import Path

import pytest

from tests.training.support.swap_server import policy_server
from trainspan_loop.addresses import agents_url_of, collectors_of, policy_servers_of
from trainspan_loop.clients.policy_servers import PolicyServers
from trainspan_loop.processes.external_servers import bring_up_to_date, check_external, level, wait_for_servers
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, base_digest, checkpoint_name, write_latest
from trainspan_schemas.config.load import load_settings
from trainspan_schemas.errors import ConfigError, ProcessError
from trainspan_schemas.store.access import StoreAddress
from trainspan_schemas.store.endpoint import is_loopback, is_this_machine
from trainspan_training.checkpoints.swap_request import PolicyAddress

ALONE = PolicyAddress("")


def model_at(folder: Path, version: int | None = None, digest: str = "d" * 32) -> str:
    """A folder that is a model, or with a version a checkpoint."""
    folder.mkdir(parents=True)
    if version is not None:
        CheckpointMeta("full", version, None, "model", None, base_digest=digest).write(folder)
    return str(folder)


def test_a_run_without_checkpoints_begins_only_with_servers_of_its_model(tmp_path: Path) -> None:
    model = model_at(tmp_path / "model")
    digest = base_digest(Path(model))
    with policy_server() as one, policy_server() as two:
        one.state = two.state = {"version": 0, "base_digest": digest}
        servers = PolicyServers([one.url, two.url])
        assert bring_up_to_date(servers, tmp_path / "none", model, [ALONE], 1) == []
        two.state = {"version": 7, "base_digest": digest}
        with pytest.raises(ConfigError, match=f"{two.url} serves version 7, which is not of this run: restart it"):
            bring_up_to_date(servers, tmp_path / "none", model, [ALONE], 1)
        two.state = {"version": 0, "base_digest": "another"}
        with pytest.raises(ConfigError, match=f"{two.url} has another model than the run: restart it with {model}"):
            bring_up_to_date(servers, tmp_path / "none", model, [ALONE], 1)
        two.state = {"version": 0, "policies": {}}
        with pytest.raises(ConfigError, match=f"{one.url} has no policy writer"):
            bring_up_to_date(servers, tmp_path / "none", model, [PolicyAddress("", "writer")], 1)
        assert not one.asked
        assert not two.asked


def test_a_run_that_starts_from_a_checkpoint_needs_servers_of_its_version(tmp_path: Path) -> None:
    best = model_at(tmp_path / "best", version=4)
    with policy_server() as server:
        server.state = {"version": 4, "base_digest": "d" * 32}
        assert bring_up_to_date(PolicyServers([server.url]), tmp_path / "none", best, [ALONE], 1) == []
        server.state = {"version": 0, "base_digest": "d" * 32}
        with pytest.raises(ConfigError, match="serves version 0, which is not of this run"):
            bring_up_to_date(PolicyServers([server.url]), tmp_path / "none", best, [ALONE], 1)


def checkpoints_at(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A folder with version 2 as its newest checkpoint, and the checkpoint's name."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(home))
    (home / "token").write_text("secret\n")
    (home / "token").chmod(0o600)
    name = checkpoint_name(2)
    model_at(home / "checkpoints" / name, version=2)
    write_latest(home / "checkpoints", name)
    return home / "checkpoints", name


def test_a_run_that_goes_on_swaps_its_newest_checkpoint_in_at_every_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, name = checkpoints_at(tmp_path, monkeypatch)
    swapped = (200, {"version": 2, "checkpoint": name, "canary": {"status": "fresh"}})
    with policy_server(swapped) as one, policy_server(swapped) as two:
        # The first has a version 2, too, but nothing says that it is this run's.
        one.state, two.state = {"version": 2, "checkpoint": name}, {"version": 0, "checkpoint": "model"}
        servers = PolicyServers([one.url, two.url])
        assert bring_up_to_date(servers, checkpoints, "model", [ALONE], 1) == []
        for server in (one, two):
            (request,) = server.asked
            assert (request[0], request[2]["checkpoint"], request[2]["version"]) == ("/trainspan/policy", name, 2)
        two.answers = [(500, {"error": "no room", "reason": "load_failed"})]
        (trouble,) = bring_up_to_date(servers, checkpoints, "model", [ALONE], 1)
        assert f"{two.url} does not take {name}: no room" in trouble
        with pytest.raises(ProcessError, match=f"{two.url} does not take {name}: no room"):
            bring_up_to_date(PolicyServers([two.url]), checkpoints, "model", [ALONE], 1)


def test_a_checkpoint_that_a_canary_refuses_is_left_to_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, _ = checkpoints_at(tmp_path, monkeypatch)
    with policy_server((409, {"error": "stale", "reason": "canary_failed"})) as server:
        server.state = {"version": 1}
        (trouble,) = bring_up_to_date(PolicyServers([server.url]), checkpoints, "model", [ALONE], 1)
        assert trouble.endswith("stale")


def test_only_servers_that_missed_a_swap_are_levelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, name = checkpoints_at(tmp_path, monkeypatch)
    swapped = (200, {"version": 2, "checkpoint": name, "canary": {"status": "fresh"}})
    with policy_server(swapped) as one, policy_server(swapped) as two:
        one.state, two.state = {"version": 2, "checkpoint": name}, {"version": 3, "checkpoint": checkpoint_name(3)}
        assert level(PolicyServers([one.url, two.url]), checkpoints, [ALONE], 1) == []
        assert (len(one.asked), len(two.asked)) == (0, 1)
        assert level(PolicyServers([one.url, two.url]), tmp_path / "none", [ALONE], 1) == []


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
    with pytest.raises(ConfigError, match=r"policy_servers needs \[train\] checkpoints_url"):
        check_external(load_settings(None, external))
    with pytest.raises(ConfigError, match=f"{name} has no effect with"):
        check_external(load_settings(None, {**external, "TRAINSPAN_TRAIN__CHECKPOINTS_URL": "s3://bucket/prefix"}))


@pytest.mark.parametrize(
    ("servers", "policy_url", "agents"),
    [
        ("", None, "http://127.0.0.1:8000/v1"),
        ("http://gpu:9000/v1", None, "http://gpu:9000/v1"),
        ("http://gpu:9000", "http://proxy/v1", "http://proxy/v1"),
        ("http://gpu1:9000,http://gpu2:9000", "http://balancer/v1", "http://balancer/v1"),
    ],
)
def test_agents_use_the_only_server_unless_a_balancer_is_set(servers: str, policy_url: str | None, agents: str) -> None:
    given = {"TRAINSPAN_ROLLOUTS__POLICY_SERVERS": servers} if servers else {}
    settings = load_settings(None, given | ({"TRAINSPAN_ROLLOUTS__POLICY_URL": policy_url} if policy_url else {}))
    assert agents_url_of(settings) == agents
    assert not any(url.endswith("/v1") for url in policy_servers_of(settings))


@pytest.mark.parametrize(
    ("host", "policy_url", "server", "agents"),
    [
        ("0.0.0.0", None, "http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("::", None, "http://[::1]:8000", "http://[::1]:8000/v1"),
        ("0.0.0.0", "http://trainer:8000/v1", "http://127.0.0.1:8000", "http://trainer:8000/v1"),
        ("10.0.0.5", None, "http://10.0.0.5:8000", "http://10.0.0.5:8000/v1"),
        ("127.0.0.1", "https://api.vendor.example/v1", "http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
    ],
)
def test_the_loops_own_server_is_named_as_agents_can_reach_it(
    host: str, policy_url: str | None, server: str, agents: str
) -> None:
    """OPENAI_BASE_URL may name a vendor: it does not count for a server of this machine alone."""
    given = {"TRAINSPAN_SERVING__HOST": host} | ({"OPENAI_BASE_URL": policy_url} if policy_url else {})
    settings = load_settings(None, given)
    assert policy_servers_of(settings) == (server,)
    assert agents_url_of(settings) == agents


@pytest.mark.parametrize(
    ("listener", "tls", "endpoint", "named"),
    [
        ("127.0.0.1:4317", False, "http://otel.vendor.example:4317", "http://127.0.0.1:4317"),
        ("127.0.0.1:4317", True, None, "https://127.0.0.1:4317"),
        ("0.0.0.0:4327", False, None, "http://127.0.0.1:4327"),
        ("[::]:4327", True, None, "https://[::1]:4327"),
        ("0.0.0.0:4327", True, "https://trainer:4327", "https://trainer:4327"),
        ("10.0.0.5:4327", False, None, "http://10.0.0.5:4327"),
        ("10.0.0.5:4327", True, "https://trainer:4327", "https://trainer:4327"),
    ],
)
def test_the_loops_own_collector_is_named_as_senders_can_reach_it(
    listener: str, tls: bool, endpoint: str | None, named: str
) -> None:
    settings = load_settings(None, {"TRAINSPAN_COLLECTOR__ENDPOINTS": endpoint} if endpoint else {})
    address = StoreAddress(1, "spans.duckdb", listener, None, "127.0.0.1:4319", tls)
    assert collectors_of(settings, address) == named


def test_an_address_of_all_networks_is_this_machine_and_no_other() -> None:
    for url in ("http://0.0.0.0:4317", "[::]:4317", "127.0.0.1:4317", "http://localhost"):
        assert is_loopback(url)
        assert is_this_machine(url)
    for url in ("http://10.0.0.5:4317", "trainer:4317", "http://[::1"):
        assert not is_loopback(url)
        assert not is_this_machine(url)
