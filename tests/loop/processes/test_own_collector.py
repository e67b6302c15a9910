"""The loop's own collector, a real one, beside a policy server and a trainer that only answer."""

import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.loop.processes.test_adopted_collector import CHILD
from tests.support.collector.process import CollectorProcess
from tests.support.ports import free_ports
from tests.training.support.swap_server import USUAL
from trainspan_loop.processes import child_processes, services
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.services import Services
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.config.settings import CollectorSettings, LoopSettings, ServingSettings, Settings, TrainSettings
from trainspan_schemas.store.access import StoreAddress, running_collector

WAIT_S = 60.0


class World:
    """Services in a folder, whose collector takes any free port."""

    def __init__(self, folder: Path, port: int) -> None:
        self.store = folder / "spans.duckdb"
        self.shown = io.StringIO()
        settings = Settings(
            collector=CollectorSettings(store=str(self.store), grpc="127.0.0.1:0", http="off", flight="127.0.0.1:0"),
            serving=ServingSettings(port=port),
            train=TrainSettings(model="model"),
            loop=LoopSettings(ready_timeout_s=WAIT_S),
        )
        screen = Screen(Console(file=self.shown, width=200), "run")
        self.services = Services(settings, None, RunFolder.create({}), screen)

    def other_collector(self, pid: int | None) -> StoreAddress:
        """Waits until a collector runs whose process is not `pid`, while the services are kept alive."""
        deadline = time.monotonic() + WAIT_S
        while (address := running_collector(self.store)) is None or address.pid == pid:
            assert time.monotonic() < deadline
            self.services.keep_alive()
            time.sleep(0.05)
        return address


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    (port,) = free_ports(1)
    real = child_processes._trainspan

    def command(arguments: list[str], launcher: list[str]) -> list[str]:
        if arguments[0] == "collector":
            options = ["--grpc", "127.0.0.1:0", "--http", "off", "--flight", "127.0.0.1:0"]
            whole = real([*arguments[:3], *options, *arguments[3:]], launcher)
            return ["sh", "-c", f'while [ -e {tmp_path}/hold ]; do sleep 0.05; done; exec "$@"', "sh", *whole]
        return [sys.executable, "-c", CHILD, arguments[0], str(tmp_path), str(port), json.dumps(USUAL.as_json())]

    monkeypatch.setattr(child_processes, "_trainspan", command)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    world = World(tmp_path, port)
    yield world
    world.services.stop()


def test_a_collector_that_was_killed_listens_again_where_servers_and_agents_look_for_it(world: World) -> None:
    world.services.start()
    option = world.services.collector_option()
    before = world.other_collector(None)
    os.kill(before.pid, signal.SIGKILL)
    after = world.other_collector(before.pid)
    assert (after.grpc, after.http, after.flight) == (before.grpc, None, before.flight)
    assert world.services.collector_option() == option


def test_a_collector_that_is_back_before_the_loop_could_start_its_own_is_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's own finds the store locked at each start."""
    monkeypatch.setattr(services, "RESTARTS_WITHIN_S", 0.0)
    adopted = CollectorProcess(world.store)
    world.services.start()
    adopted.kill()
    hold = world.store.with_name("hold")
    hold.touch()
    world.services.keep_alive()
    back = CollectorProcess(world.store)
    hold.unlink()
    try:
        deadline = time.monotonic() + WAIT_S
        while "another collector has the store: the loop uses that one" not in world.shown.getvalue():
            assert time.monotonic() < deadline
            world.services.keep_alive()
            time.sleep(0.05)
        assert "was restarted" not in world.shown.getvalue()
    finally:
        back.kill()
