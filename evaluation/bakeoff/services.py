"""A collector and a policy server for a bake-off on an agent, and the commands that run and branch it."""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evaluation.plans import Plan
from trainspan_loop.clients.policy_server import PolicyClient
from trainspan_loop.processes.child_processes import Commands, Service
from trainspan_schemas.command_events import BranchesMeasured, Event, RunResult, event_line
from trainspan_schemas.store.access import running_collector

__all__ = ["AgentWorld", "agent_world"]

READY_S = 300.0


class AgentWorld:
    """Running services of a plan's agent, with their state in `folder`."""

    def __init__(self, plan: Plan, folder: Path, environ: dict[str, str]) -> None:
        self._plan, self._environ = plan, environ
        self.folder = folder
        self.store = folder / "spans.duckdb"

    def command(self, *arguments: str) -> dict[str, Any]:
        """Runs `trainspan rollout` or `branch` with the task's settings; returns its result. Raises SystemExit if it has none."""
        result: dict[str, Any] = {}

        def on_event(event: Event) -> None:
            if isinstance(event, RunResult | BranchesMeasured):
                result.update(json.loads(event_line(event)))

        log = self.folder / "logs" / f"{arguments[0]}.log"
        whole = [*arguments, "--config", str(self._plan.config), "--format", "json"]
        code, message = Commands().run(whole, self._environ, log, on_event)
        if not result:
            raise SystemExit(
                f"evaluation: trainspan {arguments[0]} ended with exit code {code}: {message} (log: {log})"
            )
        return result


@contextmanager
def agent_world(plan: Plan, folder: Path, model: str) -> Iterator[AgentWorld]:
    """Starts collector and server on free ports, with this model, and stops them at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = folder / "spans.duckdb"
    environ = {**os.environ, **plan.environ(model), "TRAINSPAN_HOME": str(folder), "PYTHONUNBUFFERED": "1"}
    environ |= {
        "TRAINSPAN_COLLECTOR__STORE": str(store),
        "TRAINSPAN_ROLLOUTS__POLICY_URL": f"http://127.0.0.1:{port}/v1",
    }
    running: list[Service] = []

    def launch(name: str, arguments: Sequence[str]) -> Service:
        service = Service(name, [*arguments, "--config", str(plan.config)], environ, folder / "logs" / f"{name}.log")
        running.append(service)
        service.start()
        return service

    try:
        listeners = ["--grpc", "127.0.0.1:0", "--http", "off", "--flight", "127.0.0.1:0"]
        launch("collector", ["collector", *listeners]).wait_until(lambda: running_collector(store) is not None, READY_S)
        address = running_collector(store)
        assert address is not None
        environ["TRAINSPAN_ROLLOUTS__COLLECTOR"] = f"http://{address.grpc}"
        server = launch("serve", ["serve", model, "--port", str(port), "--collector", f"http://{address.grpc}"])
        server.wait_until(PolicyClient(f"http://127.0.0.1:{port}").is_healthy, READY_S)
        yield AgentWorld(plan, folder, environ)
    finally:
        for service in reversed(running):
            service.stop()
