"""Two policy servers behind nginx, under load: swaps reach both, and one that is killed catches up before it is used."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.serving.support.servers import Models
from tests.support.models.canary import write_checkpoint_files
from tests.support.otlp.sink import otlp_sink
from tests.support.policy_server.balancer import balancer
from tests.support.policy_server.files import file_server
from tests.support.policy_server.process import RunningServer, policy_server
from tests.support.ports import free_ports
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, hash_weights
from trainspan_schemas.telemetry import keys
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry
from trainspan_training.checkpoints.published import announce, publish_files, swap_in
from trainspan_training.checkpoints.swap_request import PolicyAddress

CLIENTS = 6
CALLS_PER_ROLLOUT = 4


@dataclass
class Load:
    """Clients that run rollouts of a few requests each through the balancer until told to stop."""

    url: str
    stop: threading.Event = field(default_factory=threading.Event)
    statuses: list[int] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)

    def work(self, client: int) -> None:
        server, number = RunningServer(self.url, Path(), None, Path()), 0  # type: ignore[arg-type]
        while not self.stop.is_set():
            identity = {"baggage": f"{keys.ROLLOUT_ID}=r{client}-{number}"}
            for call in range(CALLS_PER_ROLLOUT):
                body = {"model": "policy", "prompt": [20 + client, 30 + call, 40], "max_tokens": 4}
                status, _, headers = server.post("/v1/completions", body, identity)
                self.statuses.append(status)
                self.versions.add(headers.get(keys.HEADER_POLICY_VERSION, ""))
            number += 1

    @contextlib.contextmanager
    def running(self) -> Iterator["Load"]:
        clients = [threading.Thread(target=self.work, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield self
        finally:
            self.stop.set()
            for client in clients:
                client.join(120)


def make_versions(models: Models, root: Path, count: int) -> Path:
    """Checkpoints 1 to `count` on the trainer's machine: the weights of version 1 and 2 by turns."""
    root.mkdir()
    for version in range(1, count + 1):
        folder = root / f"policy-{version:06d}"
        folder.mkdir()
        for file in models.folder(2 - version % 2).iterdir():
            os.link(file, folder / file.name)
        for name in ("trainspan.json", "canary.json"):
            (folder / name).unlink()
        earlier = models.base if version == 1 else models.folder(1 + version % 2)
        write_checkpoint_files(folder, version, earlier)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [3, 20])
def test_no_request_fails_over_swaps_and_the_death_of_a_server(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: int
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "trainer"))
    (tmp_path / "trainer").mkdir()
    checkpoints = make_versions(models, tmp_path / "checkpoints", swaps)
    for home in ("trainer", "one", "two"):
        (tmp_path / home).mkdir(exist_ok=True)
        (tmp_path / home / "token").write_text("the token of swaps\n")
        (tmp_path / home / "token").chmod(0o600)
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    address = PolicyAddress(",".join(urls), checkpoints_url=f"file://{tmp_path}/published")
    with contextlib.ExitStack() as stack:
        sink, collector = stack.enter_context(otlp_sink())
        (tmp_path / "published").mkdir()
        published = stack.enter_context(file_server(tmp_path / "published"))

        def start(number: int) -> RunningServer:
            arguments = ("--port", str(ports[number]), "--collector", collector, "--checkpoints-url", published)
            home = tmp_path / ("one", "two")[number]
            return stack.enter_context(policy_server(models.base, home, *arguments, "--checkpoints", str(home / "own")))

        def swap(version: int) -> dict[str, str]:
            folder = checkpoints / f"policy-{version:06d}"
            done = swap_in(folder, address, retry_for_s=60, was_there=True)
            assert done.outcome == "swapped", done
            CheckpointLedger(checkpoints).append(LedgerEntry("published", None, folder.name))
            announce(checkpoints, address)
            assert done.answer is not None
            return {url: str(one["outcome"]) for url, one in done.answer["servers"].items()}

        with ThreadPoolExecutor(2) as pool:
            one, two = pool.map(start, (0, 1))
        front = stack.enter_context(balancer(tmp_path, *urls))
        with Load(front).running() as load:
            assert set(swap(1).values()) == {"swapped"}
            two.kill()
            assert swap(2) == {urls[0]: "swapped", urls[1]: "unreachable"}
            two = start(1)
            assert two.policy()["version"] == 2, "it has caught up before it answers anybody"
            for version in range(3, swaps + 1):
                assert set(swap(version).values()) == {"swapped"}
            deadline = time.monotonic() + 60
            while str(swaps) not in load.versions and time.monotonic() < deadline:
                time.sleep(0.1)
        assert set(load.statuses) == {200}, load.statuses
        assert load.versions >= {"1", str(swaps)}
        assert [server.policy()["version"] for server in (one, two)] == [swaps, swaps]
        assert sorted(path.name for path in (tmp_path / "two" / "own").glob("policy-*"))[-1] == f"policy-{swaps:06d}"
        calls = [span for span in sink.spans() if span.attributes.get(keys.ROLLOUT_ID)]
    served = {
        server: {str(call.attributes[keys.ROLLOUT_ID]) for call in calls if call.attributes[keys.CALL_SERVER] == server}
        for server in {call.attributes[keys.CALL_SERVER] for call in calls}
    }
    assert len(served) >= 2, "both servers answered"
    shared = set.intersection(*served.values()) if len(served) == 2 else set()
    assert len(shared) <= 2 * CLIENTS, "only the rollouts at the time of the kill and of the return had to move"


@pytest.mark.slow
def test_a_server_that_starts_before_the_trainers_machine_catches_up_while_it_listens(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "trainer"))
    checkpoints = make_versions(models, tmp_path / "checkpoints", 2)
    for home in ("trainer", "one"):
        (tmp_path / home).mkdir()
        (tmp_path / home / "token").write_text("the token of swaps\n")
        (tmp_path / home / "token").chmod(0o600)
    for folder in sorted(checkpoints.iterdir()):
        replace(CheckpointMeta.read(folder), weights_sha256=hash_weights(folder)).write(folder)
    CheckpointLedger(checkpoints).append(LedgerEntry("published", None, "policy-000001"))
    address = PolicyAddress("http://127.0.0.1:9", checkpoints_url=f"file://{tmp_path}/published")
    announce(checkpoints, address)
    publish_files(checkpoints / "policy-000002", address)
    (port,) = free_ports(1)
    arguments = ("--checkpoints-url", f"http://127.0.0.1:{port}", "--checkpoints", str(tmp_path / "own"))
    with policy_server(models.base, tmp_path / "one", "--collector", "none", *arguments) as server:
        state = server.policy()
        assert (state["version"], "the request failed" in state["behind"]) == (0, True)
        with file_server(tmp_path / "published", port):
            deadline = time.monotonic() + 60
            while (state := server.policy())["behind"] and time.monotonic() < deadline:
                time.sleep(0.2)
            assert (state["version"], state["behind"]) == (1, None), "the accepted one, not the newest"
            # What the trainer offers is taken over what is accepted; a folder of the same name is not taken for it.
            assert swap_with(server, "policy-000002", 2, "0" * 64) == (503, "copy_failed")
            sha256 = CheckpointMeta.read(checkpoints / "policy-000002").weights_sha256
            assert swap_with(server, "policy-000002", 2, sha256) == (200, None)
            assert server.policy()["weights_sha256"] == sha256


def swap_with(server: RunningServer, checkpoint: str, version: int, sha256: str | None) -> tuple[int, str | None]:
    body = {"checkpoint": checkpoint, "version": version, "weights_sha256": sha256}
    token = (server.home / "token").read_text().strip()
    status, answer, _ = server.post("/trainspan/policy", body, {"Authorization": f"Bearer {token}"})
    return status, answer.get("reason")
