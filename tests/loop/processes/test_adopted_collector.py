"""A collector that the loop found running ends, such as that of a loop that was killed: the loop starts its own."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.ports import free_ports
from tests.training.support.swap_server import USUAL
from trainspan_loop.processes import child_processes, services
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.services import Services
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.config.settings import LoopSettings, ServingSettings, Settings, TrainSettings
from trainspan_schemas.store.access import StoreAddress

CHILD = """
import http.server, pathlib, sys, time
name, folder, port = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
if name == "collector":
    if not (folder / "tried").exists():
        (folder / "tried").touch()
        sys.exit("the store is in use")
    (folder / "collects").touch()
if name == "train":
    print('{"event": "ready"}', flush=True)
if name != "serve":
    time.sleep(60)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[4].encode())
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""Replaces the commands. The collector finds the store locked at its first start."""


def test_the_loop_starts_a_collector_when_the_one_that_it_found_running_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    state = json.dumps(USUAL.as_json())
    adopted, own = tmp_path / "adopted", tmp_path / "collects"
    adopted.touch()

    address = StoreAddress(1, "spans.duckdb", "127.0.0.1:1", None, "127.0.0.1:2")

    def running_collector(_: Path) -> StoreAddress | None:
        return address if adopted.exists() or own.exists() else None

    def command(arguments: list[str], _: object) -> list[str]:
        return [sys.executable, "-c", CHILD, arguments[0], str(tmp_path), str(port), state]

    stopped: list[str] = []
    end = child_processes.Service.stop

    def stop(service: child_processes.Service) -> None:
        stopped.append(service.name)
        end(service)

    monkeypatch.setattr(child_processes.Service, "stop", stop)
    monkeypatch.setattr(child_processes, "_trainspan", command)
    monkeypatch.setattr(services, "running_collector", running_collector)
    monkeypatch.setattr(services, "RESTARTS_WITHIN_S", 0.5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    settings = Settings(
        serving=ServingSettings(port=port),
        train=TrainSettings(model="model"),
        loop=LoopSettings(ready_timeout_s=30),
    )
    shown = io.StringIO()
    loop = Services(settings, None, RunFolder.create({}), Screen(Console(file=shown, width=200), "run"))
    try:
        loop.start()
        assert not (tmp_path / "tried").exists()
        adopted.unlink()
        loop.keep_alive()
        assert not (tmp_path / "tried").exists(), "whoever started it may be restarting it"
        assert loop.collector_option() == ["--collector", "http://127.0.0.1:1"]
        assert own.exists()
    finally:
        loop.stop()
    assert stopped == ["trainer", "policy server", "collector"], "the others send their last spans first"
    assert shown.getvalue().count("the collector has ended: the loop starts its own") == 1
    loop.keep_alive()
    assert "was restarted" not in shown.getvalue().partition("stopping")[2], "a thread may still ask a silent server"
