"""The long-lived processes of a run: collector, policy server and trainers, started, watched and stopped together."""

import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from trainspan_loop.addresses import agents_url_of, collectors_of, policy_servers_of, stores_of, with_server_port
from trainspan_loop.clients.new_rewards import last_places
from trainspan_loop.clients.policy_servers import PolicyServers
from trainspan_loop.processes.child_processes import Service
from trainspan_loop.processes.devices import Devices
from trainspan_loop.processes.external_servers import bring_up_to_date, check_external, level, wait_for_servers
from trainspan_loop.processes.screen import Screen
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.checkpoint import LATEST
from trainspan_schemas.artifacts.dataset import dataset_dirs
from trainspan_schemas.config.policy_scope import Policy, policies_of
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, ProcessError
from trainspan_schemas.home import policy_dir, store_path
from trainspan_schemas.store.access import StoreAddress, running_collector
from trainspan_training.checkpoints.published import announce
from trainspan_training.checkpoints.swap_request import PolicyAddress

__all__ = ["Services"]

RESTARTS_WITHIN_S = 10.0
"""Others may be restarting their collector: after this time the loop starts its own."""


class Services:
    """`config` is passed to every child command. Collectors and policy servers of others are used and not stopped."""

    def __init__(self, settings: Settings, config: Path | None, folder: RunFolder, screen: Screen) -> None:
        self._settings = settings = with_server_port(settings)
        self._folder = folder
        self._screen = screen
        self._running: list[Service] = []
        self._restarting = threading.Lock()
        self._stopping = threading.Event()
        self._trainers: dict[Policy, Service] = {}
        self.config = ["--config", str(config)] if config else []
        self._policies = policies_of(settings)
        check_external(settings)
        self.devices = Devices.of(
            settings.loop,
            os.environ,
            trainers=len(self._policies),
            has_server=not settings.rollouts.policy_servers and settings.serving.device != "cpu",
            has_trainer=settings.model.device != "cpu",
        )
        self.environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._are_external = bool(settings.rollouts.policy_servers)
        """Whether others started the policy servers."""
        # Each may be restarting: after a crash of vLLM by itself, after one of the whole server by whoever started it.
        self.policy = PolicyServers(
            policy_servers_of(settings), retry_for_s=settings.loop.ready_timeout_s, on_silence=self.keep_alive
        )
        self.agents_url = agents_url_of(settings)
        self._own_store = store_path(settings.collector.store)
        self.stores = stores_of(settings)
        self._listeners: list[str] = []
        """Options for a collector that takes the place of the first one: servers, runners and agents know its addresses."""
        self._alone_since = math.inf
        """Since when no collector has run for the own store."""

    def start(self) -> None:
        """Starts all services and returns when they are ready. Raises ConfigError, ProcessError."""
        settings, folder = self._settings, self._folder
        model = settings.train.model or settings.serving.model
        if model is None:
            raise ConfigError("the loop needs [train] model: the model to start from")
        folder.checkpoints.mkdir(exist_ok=True)
        folder.datasets.mkdir(exist_ok=True)
        timeout_s = settings.loop.ready_timeout_s
        self._start_collector(timeout_s)
        self._screen.stage("starting the policy server and the trainer")
        checkpoints = ["--checkpoints", str(folder.checkpoints)]
        if self._are_external:
            addresses = [self._address(policy) for policy in self._policies]
            for address in addresses:  # an earlier run's checkpoint is accepted no more
                announce(policy_dir(folder.checkpoints, address.policy), address)
            wait_for_servers(self.policy, timeout_s)
            for trouble in bring_up_to_date(self.policy, folder.checkpoints, model, addresses, timeout_s):
                self._screen.note(trouble)
            server = None
        else:
            server = self._start_server(model, checkpoints, timeout_s)
        follow = ["train", "--follow", "--dataset", str(folder.datasets), "--model", model, *checkpoints]
        follow += ["--policy-url", self.policy.url, "--format", "json"]
        self._launch_trainers([*follow, *(["--keep-start"] if settings.loop.trial_tasks else [])])
        if server is not None:
            server.wait_until(self.policy.is_healthy, timeout_s)
        for trainer in self._trainers.values():
            trainer.wait_until(partial(_has_spoken, trainer), timeout_s)
        state = self.policy.state()
        for policy in self._policies:
            self._screen.policy(state.of(policy).version, policy)

    def _start_server(self, model: str, checkpoints: list[str], timeout_s: float) -> Service:
        """Starts the loop's own policy server, and waits for it if the trainer needs it at once."""
        settings, folder, devices = self._settings, self._folder, self.devices
        # The model is the base of several policies, whose adapters the server finds by itself.
        start = [] if (folder.checkpoints / LATEST).exists() else [model]
        server = self._launch(
            "policy server",
            ["serve", *start, *checkpoints, "--port", str(settings.serving.port), *self.collector_option()],
            environ=devices.environ(self.environ, devices.server),
            flags=devices.server_flags(settings.loop.server_flags),
        )
        # A trainer adapts to the memory that the server leaves on a shared GPU. With a dataset from before an interruption
        # it would be done before the server could swap.
        are_built = any(dataset_dirs(policy_dir(folder.datasets, policy)) for policy in self._policies)
        if devices.shared or are_built:
            server.wait_until(self.policy.is_healthy, timeout_s)
        if devices.shared and settings.serving.sleep:
            self.policy.sleep()
        return server

    def _address(self, policy: Policy) -> PolicyAddress:
        return PolicyAddress(self.policy.url, policy, self._settings.train.checkpoints_url)

    def _launch_trainers(self, command: list[str]) -> None:
        """Starts a trainer for each policy, on devices of its own or with its share of their memory."""
        for policy, allotted in zip(self._policies, self.devices.trainers, strict=True):
            share = allotted.share * self._settings.model.memory_share
            scope = [] if policy is None else ["--policy", policy, "--memory-share", f"{share:g}"]
            self._trainers[policy] = self._launch(
                "trainer" if policy is None else f"trainer {policy}",
                [*command, *scope],
                environ=self.devices.environ(self.environ, allotted.devices),
                launcher=allotted.launcher,
            )

    def trainer(self, policy: Policy) -> Service:
        return self._trainers[policy]

    def collector_option(self) -> list[str]:
        """The option that names the running collectors for senders of spans."""
        collector = self._settings.collector
        if collector.stores:
            return ["--collector", ",".join(collector.endpoints)]
        address = self._wait_for_collector()
        if address.grpc is None:
            raise ProcessError(f"no collector with an OTLP listener runs for {self._own_store}")
        return ["--collector", collectors_of(self._settings, address)]

    def _start_collector(self, timeout_s: float) -> None:
        """Starts one unless the settings name the stores of others, which must answer. Raises StoreError."""
        collector = self._settings.collector
        if len(collector.endpoints) > 1 and len(collector.stores) != len(collector.endpoints):
            raise ConfigError(
                f"[collector] has {len(collector.endpoints)} endpoints and {len(collector.stores)} stores: name the store "
                "of each collector, so that the loop can read all of them"
            )
        if collector.stores:
            last_places(self.stores)
            return
        if (address := running_collector(self._own_store)) is not None:
            self._listeners = _listeners(address)
            return
        self._screen.stage("starting the collector")
        started = self._launch_collector()
        started.wait_until(lambda: running_collector(self._own_store) is not None, timeout_s)
        if (address := running_collector(self._own_store)) is not None:
            self._listeners = _listeners(address)
            started.restart_with(self._listeners)

    def _launch_collector(self) -> Service:
        started = self._launch("collector", ["collector", "--store", str(self._own_store), *self._listeners])
        self._running.insert(0, self._running.pop())  # it is stopped last: the others send their last spans first
        return started

    def _wait_for_collector(self) -> StoreAddress:
        """Keeps services alive until a collector runs. Raises ProcessError."""
        deadline = time.monotonic() + self._settings.loop.ready_timeout_s
        while (address := running_collector(self._own_store)) is None:
            if time.monotonic() > deadline or self._stopping.is_set():
                raise ProcessError(f"no collector runs for {self._own_store}")
            self.keep_alive()
            time.sleep(0.1)
        return address

    def _lacks_collector(self) -> bool:
        """Whether the collector that the loop found running has ended, such as that of a loop that was killed."""
        has_own = any(service.name == "collector" for service in self._running)
        if self._settings.collector.stores or has_own or running_collector(self._own_store) is not None:
            self._alone_since = math.inf
            return False
        self._alone_since = min(self._alone_since, time.monotonic())
        return time.monotonic() - self._alone_since >= RESTARTS_WITHIN_S

    def _adopt_collector(self) -> None:
        """Uses a collector of others that got the store before the loop's own, which then ended."""
        own = next((service for service in self._running if service.name == "collector"), None)
        if own is None or not own.has_exited():
            return
        address = running_collector(self._own_store)
        if address is not None and not address.for_readers:
            self._screen.note("another collector has the store: the loop uses that one")
            self._running.remove(own)

    def keep_alive(self) -> None:
        """Restarts services that exited, and starts a collector if that of others ended; does nothing once they are stopped.

        Raises ProcessError after too many restarts.
        """
        with self._restarting:
            if self._stopping.is_set():
                return
            if self._lacks_collector():
                self._screen.note("the collector has ended: the loop starts its own")
                self._launch_collector()  # restarted below while the other one still has the store locked
            self._adopt_collector()
            for service in self._running:
                if service.keep_alive():
                    self._screen.note(f"{service.name} exited unexpectedly and was restarted")
                    if service.name == "policy server":
                        service.wait_until(self._is_server_ready, self._settings.loop.ready_timeout_s)

    def _is_server_ready(self) -> bool:
        """Whether nothing need wait for the policy server any more."""
        return self._stopping.is_set() or self.policy.is_healthy()

    def level_servers(self) -> list[str]:
        """Makes servers of others that missed a swap serve the newest versions; returns which do not, and why.

        Those that do not answer are left out: they catch up before they serve.
        """
        if not self._are_external:
            return []
        patience_s = self._settings.train.publish_timeout_s
        troubles = level(self.policy, self._folder.checkpoints, list(map(self._address, self._policies)), patience_s)
        for trouble in troubles:
            self._screen.note(trouble)
        return troubles

    def stop(self) -> None:
        """Stops all services, the last started first."""
        self._screen.stage("stopping")
        self._stopping.set()
        with self._restarting:  # a restart in progress ends first
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
        service = Service(name, whole, environ or self.environ, log, launcher)
        self._running.append(service)
        service.start()
        return service


def _listeners(address: StoreAddress) -> list[str]:
    """Options with which a collector listens where this one does; none for one that takes no telemetry."""
    if address.grpc is None:
        return []
    listeners = {"--grpc": address.grpc, "--http": address.http or "off", "--flight": address.flight}
    return [word for option in listeners.items() for word in option]


def _has_spoken(service: Service) -> bool:
    return not service.events.empty()
