"""The long-lived processes of a run: collector, policy server and trainer, started, watched and stopped together."""

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainspan_cli.clients.policy_server import PolicyClient
from trainspan_cli.loop.processes.child_processes import Service
from trainspan_cli.loop.processes.devices import Devices
from trainspan_cli.loop.processes.screen import Screen
from trainspan_cli.loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.checkpoint import LATEST
from trainspan_schemas.artifacts.dataset import dataset_dirs
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, ProcessError
from trainspan_schemas.home import store_path
from trainspan_schemas.store.access import running_collector

__all__ = ["Services"]


class Services:
    """`config` is passed to every child command. A collector that already runs for the store is used and not stopped."""

    def __init__(self, settings: Settings, config: Path | None, folder: RunFolder, screen: Screen) -> None:
        self._settings = settings
        self._folder = folder
        self._screen = screen
        self._running: list[Service] = []
        self._restarting = threading.Lock()
        self._trainer: Service | None = None
        self.config = ["--config", str(config)] if config else []
        self.devices = Devices.of(settings.loop, os.environ)
        self.environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.policy = PolicyClient(f"http://{settings.serving.host}:{settings.serving.port}")
        self.store = store_path(settings.collector.store)

    def start(self) -> None:
        """Starts all services and returns when they are ready. Raises ConfigError, ProcessError."""
        settings, folder = self._settings, self._folder
        model = settings.train.model or settings.serving.model
        if model is None:
            raise ConfigError("the loop needs [train] model: the model to start from")
        folder.checkpoints.mkdir(exist_ok=True)
        folder.datasets.mkdir(exist_ok=True)
        timeout_s = settings.loop.ready_timeout_s
        if running_collector(self.store) is None:
            self._screen.stage("starting the collector")
            collector = self._launch("collector", ["collector", "--store", str(self.store)])
            collector.wait_until(lambda: running_collector(self.store) is not None, timeout_s)
        self._screen.stage("starting the policy server and the trainer")
        checkpoints = ["--checkpoints", str(folder.checkpoints)]
        start = [] if (folder.checkpoints / LATEST).exists() else [model]
        devices = self.devices
        server = self._launch(
            "policy server",
            ["serve", *start, *checkpoints, *self.collector_option()],
            environ=devices.environ(self.environ, devices.server),
            flags=devices.server_flags(settings.loop.server_flags),
        )
        # The trainer adapts to the memory that the server leaves on a shared GPU. With a dataset from before an interruption
        # it would be done before the server could swap.
        if devices.shared or any(dataset_dirs(folder.datasets)):
            server.wait_until(self.policy.is_healthy, timeout_s)
        if devices.shared and settings.serving.sleep:
            self.policy.sleep()
        follow = ["train", "--follow", "--dataset", str(folder.datasets), "--model", model, *checkpoints]
        self._trainer = self._launch(
            "trainer",
            [*follow, "--policy-url", self.policy.url, "--format", "json"],
            environ=devices.environ(self.environ, devices.trainer),
            launcher=devices.launcher,
        )
        server.wait_until(self.policy.is_healthy, timeout_s)
        self._trainer.wait_until(lambda: not self.trainer.events.empty(), timeout_s)
        self._screen.policy(self.policy.policy()["version"])

    @property
    def trainer(self) -> Service:
        assert self._trainer is not None, "started"
        return self._trainer

    def collector_option(self) -> list[str]:
        """The option that names the running collector for senders of spans."""
        address = running_collector(self.store)
        if address is None or address.grpc is None:
            raise ProcessError(f"no collector with an OTLP listener runs for {self.store}")
        return ["--collector", f"http://{address.grpc}"]

    def keep_alive(self) -> None:
        """Restarts services that exited. Raises ProcessError after too many restarts."""
        with self._restarting:
            for service in self._running:
                if service.keep_alive():
                    self._screen.note(f"{service.name} exited unexpectedly and was restarted")
                    if service.name == "policy server":
                        service.wait_until(self.policy.is_healthy, self._settings.loop.ready_timeout_s)

    def stop(self) -> None:
        """Stops all services, the last started first."""
        self._screen.stage("stopping")
        for service in reversed(self._running):
            service.stop()

    def _launch(
        self,
        name: str,
        arguments: list[str],
        *,
        environ: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (sys.executable,),
        flags: Sequence[str] = (),
    ) -> Service:
        log = self._folder.logs / f"{name.replace(' ', '-')}.log"
        whole = [*arguments, *self.config, *flags]
        service = Service(name, whole, environ or self.environ, log, self._settings.loop.restarts, launcher)
        self._running.append(service)
        service.start()
        return service
