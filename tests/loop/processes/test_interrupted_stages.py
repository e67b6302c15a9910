"""Stages that are interrupted, or whose store is away for a while: nothing is made twice or lost. With a real collector."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.agents.programs import environment
from tests.support.collector.process import CollectorProcess
from tests.support.ports import free_ports
from tests.training.support.swap_server import policy_server
from trainspan_loop.clients.policy_servers import PolicyServers
from trainspan_loop.clients.store import rows
from trainspan_loop.processes import stages
from trainspan_loop.processes.stages import Stages
from trainspan_rollouts.ledger.recorded import waiting_rounds
from trainspan_schemas.config.agents import RolloutsSettings
from trainspan_schemas.config.loop import LoopSettings
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ProcessError, StoreError

WAIT_S = 60.0
AGENT = """
import pathlib, time

def solve(task):
    with open("ran.txt", "a") as file:
        file.write(task["id"] + "\\n")
    while task["id"] == "slow" and pathlib.Path("wait").exists():
        time.sleep(0.05)
    return float(len(task["id"]))
"""


class World:
    """The stages of a run in a folder, a collector that can be stopped and started again, and an idle policy server."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.store = folder, folder / "spans.duckdb"
        self.otlp, flight = free_ports(2)
        self.listeners = ("--grpc", f"127.0.0.1:{self.otlp}", "--flight", f"127.0.0.1:{flight}", "--http", "off")
        self.location = f"grpc://127.0.0.1:{flight}"
        self.collector: CollectorProcess | None = None
        self.notes: list[str] = []
        run: Any = SimpleNamespace(run_id="run", logs=folder / "logs", datasets=folder / "dataset")
        screen: Any = SimpleNamespace(note=self.notes.append, progress=lambda _: None)
        services: Any = SimpleNamespace(
            stores=(self.location,),
            policy=PolicyServers([url]),
            agents_url=f"{url}/v1",
            collector_option=lambda: ["--collector", f"http://127.0.0.1:{self.otlp}"],
            environ=environment({"TRAINSPAN_HOME": str(folder)}),
            config=[],
            keep_alive=lambda: None,
        )
        rollouts = RolloutsSettings(n=2, concurrency=4)
        loop = LoopSettings(target="agent.py:solve", ready_timeout_s=WAIT_S)
        self.stages = Stages(Settings(rollouts=rollouts, loop=loop), services, run, screen)
        self.tasks = folder / "tasks.jsonl"
        self.tasks.write_text("".join(json.dumps({"id": name, "input": "x"}) + "\n" for name in ("a", "b", "slow")))

    def start_collector(self) -> None:
        self.collector = CollectorProcess(self.store, *self.listeners)

    def stop_collector(self) -> None:
        if self.collector is not None:
            self.collector.terminate()
        self.collector = None

    def ran(self) -> Counter[str]:
        """Task → how often its agent ran."""
        file = self.folder / "ran.txt"
        return Counter(file.read_text().split() if file.exists() else [])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    counts = dict.fromkeys(("calls_captured", "calls_exported", "calls_dropped", "calls_refused"), 0)
    own = {"internal_requests": 0, "internal_calls": 0, "started_ns": 1, "now_ns": 2**63}  # its clock is not behind
    with policy_server() as server:
        server.state = {"version": 0, "changing": False, **counts, **own}
        world = World(tmp_path, server.url)
        yield world
        world.stages.stop()
        world.stop_collector()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.ci
def test_a_collector_that_restarts_ends_neither_a_read_nor_a_dataset(world: World) -> None:
    def read_while_away(read: Callable[[], Any]) -> Any:
        world.stop_collector()
        world.notes.clear()
        back = threading.Timer(1.5, world.start_collector)
        back.start()
        found = read()
        back.join()
        (note,) = world.notes
        assert note.startswith("a store does not answer, and is asked again: ")
        return found

    world.start_collector()
    assert read_while_away(world.stages.last_places) == (0,)
    nothing = read_while_away(lambda: world.stages.live_dataset(1, (0,)))[None]
    assert nothing.reason.startswith("no call")
    assert nothing.figures["calls_seen"] == 0


def test_a_loop_that_stops_waits_for_no_store(world: World) -> None:
    threading.Timer(0.5, world.stages.stop).start()
    with pytest.raises(StoreError):
        world.stages.last_places()


def test_a_dataset_that_fails_for_another_reason_is_built_once(world: World) -> None:
    world.start_collector()
    (world.folder / "dataset").write_text("a file")
    with pytest.raises(ProcessError, match="dataset failed"):
        world.stages.dataset(1, are_stored=True)
    assert world.notes == []


@pytest.mark.ci
def test_an_interrupted_round_is_finished_and_its_rollouts_are_not_made_twice(world: World) -> None:
    world.start_collector()
    (world.folder / "wait").touch()
    stopped: list[ProcessError] = []

    def collect() -> None:
        try:
            world.stages.collect(world.tasks, 1, "train", 2)
        except ProcessError as error:
            stopped.append(error)

    first = threading.Thread(target=collect)
    first.start()
    until(lambda: world.ran() == {"a": 2, "b": 2, "slow": 2})
    (ledger,) = (world.folder / "rollouts" / "run").glob("*.jsonl")
    until(lambda: ledger.read_text().count('"end"') == 4)
    world.stages.stop()
    first.join()
    assert stopped
    world.stages.resume()
    (world.folder / "wait").unlink()

    collected = world.stages.collect(world.tasks, 1, "train", 2)
    assert (collected.result.total, collected.result.resumed) == (6, 4)
    assert collected.result.status == {"ok": 6}
    assert collected.is_stored
    assert world.ran() == {"a": 2, "b": 2, "slow": 4}
    query = "SELECT task_id, count(DISTINCT rollout_id) AS n FROM rollouts WHERE round = 1 GROUP BY task_id"
    assert {row["task_id"]: row["n"] for row in rows(world.location, query)} == {"a": 2, "b": 2, "slow": 2}
    again = world.stages.collect(world.tasks, 1, "train", 2)
    assert again.result.resumed == 6
    assert [check["name"] for check in again.checks if not check["ok"]] == [], "there was nothing left to count"


def test_a_rollout_that_is_never_stored_is_waited_for_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "STORED_TIMEOUT_S", 0.3)
    world.start_collector()
    began_ns = time.time_ns()
    world.stages.collect(world.tasks, 1, "train", 2)
    assert world.stages.wait_until_stored(6, began_ns, 0) == 0
    assert world.stages.wait_until_stored(7, began_ns, 0) == 1
    monkeypatch.setattr(stages, "STORED_TIMEOUT_S", 600.0)
    assert world.stages.wait_until_stored(7, began_ns, 1) == 1


def test_a_validation_that_was_interrupted_begins_anew(world: World) -> None:
    world.start_collector()
    world.stages.collect(world.tasks, 1, "val", 1)
    assert world.stages.collect(world.tasks, 1, "val", 1).result.resumed == 0


@pytest.mark.ci
def test_verdicts_of_an_interrupted_stream_are_sent(world: World) -> None:
    options = ["--tasks", "-", "--n", "2", "--split", "train", "--round", "7", "--run", "run", "--format", "json"]
    collector = f"http://127.0.0.1:{world.otlp}"
    command = [sys.executable, "-m", "trainspan_cli", "rollout", *options, "--collector", collector, "agent.py:solve"]
    environ = environment({"TRAINSPAN_HOME": str(world.folder), "TRAINSPAN_ROLLOUTS__DELIVER_TIMEOUT_S": "0.5"})
    task = json.dumps({"id": "a", "input": "x", "round": 7})
    subprocess.run(command, input=task, env=environ, cwd=world.folder, capture_output=True, text=True, check=False)
    assert waiting_rounds("run", "train") == [7]
    world.start_collector()
    world.stages.send_waiting()
    assert waiting_rounds("run", "train") == []
    assert rows(world.location, "SELECT count(*) AS n FROM rollouts WHERE reward = 1")[0]["n"] == 2
    assert world.ran() == {"a": 2}


@pytest.mark.ci
def test_attempts_of_a_killed_stream_are_ended_as_cancelled(world: World) -> None:
    world.start_collector()
    (world.folder / "wait").touch()
    options = ["--tasks", "-", "--n", "2", "--split", "train", "--round", "7", "--run", "run", "--format", "json"]
    collector = f"http://127.0.0.1:{world.otlp}"
    command = [sys.executable, "-m", "trainspan_cli", "rollout", *options, "--collector", collector, "agent.py:solve"]
    environ = environment({"TRAINSPAN_HOME": str(world.folder)})
    with subprocess.Popen(command, env=environ, cwd=world.folder, stdin=subprocess.PIPE, text=True) as stream:
        assert stream.stdin is not None
        stream.stdin.write(json.dumps({"id": "slow", "input": "x", "round": 7}) + "\n")
        stream.stdin.flush()
        until(lambda: world.ran() == {"slow": 2})
        stream.kill()
    assert waiting_rounds("run", "train") == [7]
    world.stages.send_waiting()
    assert waiting_rounds("run", "train") == []
    ended = rows(world.location, "SELECT status, run_id FROM rollouts WHERE task_id = 'slow'")
    assert ended == [{"status": "cancelled", "run_id": "run"}] * 2
    assert world.ran() == {"slow": 2}, "nothing was made again"
