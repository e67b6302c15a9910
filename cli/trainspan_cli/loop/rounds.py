"""The loop itself: evaluate, then round after round collect rollouts, build the dataset, train and swap; evaluate again."""

import hashlib
import os
import queue
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trainspan_schemas.checkpoint import LATEST
from trainspan_schemas.dataset import MANIFEST, round_dir_name
from trainspan_schemas.errors import ConfigError, ProcessError
from trainspan_schemas.functions import is_function_name
from trainspan_schemas.home import store_path
from trainspan_schemas.settings import Settings
from trainspan_schemas.store import running_collector

from .counts import StageMeter
from .integrity import dataset_checks, stage_checks, training_checks
from .policy_client import PolicyClient
from .processes import Service, run_command
from .run_folder import RunFolder, task_lines
from .screen import Screen

__all__ = ["Loop", "settings_record"]

EvalName = Literal["validation", "probe"]


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of one `trainspan rollout`."""

    result: dict[str, Any]
    checks: list[dict[str, Any]]
    seconds: float


class Loop:
    """One run. `config` is handed to every child command; `folder` keeps what is needed to go on after a kill."""

    def __init__(self, settings: Settings, config: Path | None, folder: RunFolder, screen: Screen) -> None:
        self._settings = settings
        self._folder = folder
        self._screen = screen
        self._config = ["--config", str(config)] if config else []
        self._environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        serving = settings.serving
        self._policy = PolicyClient(f"http://{serving.host}:{serving.port}")
        self._store = store_path(settings.collector.store)
        self._services: list[Service] = []
        self._trainer: Service | None = None
        self._tasks = {split: self._task_lines(split) for split in ("train", "val")}

    def _task_lines(self, split: str) -> list[str]:
        if not self._settings.rollouts.tasks or not self._settings.loop.target:
            raise ConfigError("the loop needs [rollouts] tasks and [loop] target in trainspan.toml")
        return task_lines(Path(self._settings.rollouts.tasks), split)

    def run(self) -> dict[str, Any]:
        """Runs or goes on; returns the result record. Raises ProcessError, ConfigError, TaskFileError."""
        loop = self._settings.loop
        if not self._tasks["train"]:
            raise ConfigError(f"{self._settings.rollouts.tasks} has no task of split train")
        try:
            self._start_services()
            records = self._folder.records()
            done = {record["round"] for record in records if record["kind"] == "round"}
            self._evaluate(0, loop.eval_tasks, probe=True)
            for round_ in range(1, loop.rounds + 1):
                if round_ not in done:
                    self._round(round_)
                last = round_ == loop.rounds
                if last:
                    self._evaluate(round_, loop.eval_tasks, probe=True)
                elif loop.eval_every and round_ % loop.eval_every == 0:
                    self._evaluate(round_, loop.val_tasks)
        finally:
            self._stop_services()
        self._folder.finish("finished")
        return {"run_id": self._folder.run_id, "folder": str(self._folder.path), "records": self._folder.records()}

    # Processes

    def _start_services(self) -> None:
        settings, folder = self._settings, self._folder
        folder.checkpoints.mkdir(exist_ok=True)
        folder.datasets.mkdir(exist_ok=True)
        model = settings.train.model or settings.serving.model
        if model is None:
            raise ConfigError("the loop needs [train] model: the model to start from")
        timeout_s = settings.loop.ready_timeout_s
        if running_collector(self._store) is None:
            self._screen.stage("starting the collector")
            collector = self._launch("collector", ["collector", "--store", str(self._store)])
            collector.wait_until(lambda: running_collector(self._store) is not None, timeout_s)
        self._screen.stage("starting the policy server and the trainer")
        checkpoints = ["--checkpoints", str(folder.checkpoints)]
        start = [] if (folder.checkpoints / LATEST).exists() else [model]
        server = self._launch("policy server", ["serve", *start, *checkpoints, *self._collector()])
        follow = ["train", "--follow", "--dataset", str(folder.datasets), "--model", model, *checkpoints]
        self._trainer = self._launch("trainer", [*follow, "--policy-url", self._policy.url, "--format", "json"])
        server.wait_until(self._policy.is_healthy, timeout_s)
        self._trainer.wait_until(lambda: not self._trainer.events.empty(), timeout_s)  # type: ignore[union-attr]
        self._screen.policy(self._policy.policy()["version"])

    def _collector(self) -> list[str]:
        """The option that names the running collector to those who send spans."""
        address = running_collector(self._store)
        if address is None or address.grpc is None:
            raise ProcessError(f"no collector with an OTLP listener runs for {self._store}")
        return ["--collector", f"http://{address.grpc}"]

    def _launch(self, name: str, arguments: list[str]) -> Service:
        log = self._folder.logs / f"{name.replace(' ', '-')}.log"
        service = Service(name, [*arguments, *self._config], self._environ, log, self._settings.loop.restarts)
        self._services.append(service)
        service.start()
        return service

    def _keep_alive(self) -> None:
        for service in self._services:
            if service.keep_alive():
                self._screen.note(f"{service.name} ended by itself and was restarted")
                if service.name == "policy server":
                    service.wait_until(self._policy.is_healthy, self._settings.loop.ready_timeout_s)

    def _stop_services(self) -> None:
        self._screen.stage("stopping")
        for service in reversed(self._services):
            service.stop()

    # Stages

    def _command(
        self, name: str, arguments: list[str], target: Sequence[str], on_event: Callable[[dict[str, Any]], None]
    ) -> None:
        self._keep_alive()
        log = self._folder.logs / f"{name}.log"
        whole = [name, *arguments, *self._config, "--format", "json", *target]
        code, message = run_command(whole, self._environ, log, on_event)
        if code != 0:
            raise ProcessError(f"{name} failed: {message.removeprefix('trainspan: ')} (log: {log})")

    def _collect(self, tasks: Path, round_: int, split: str, n: int) -> Collected:
        """Runs the agent on a task file and takes the counts of all parties."""
        began = time.monotonic()
        settings = self._settings.rollouts
        result: dict[str, Any] = {}

        def on_event(event: dict[str, Any]) -> None:
            if event.get("event") == "result":
                result.update(event)
            elif event.get("event") == "progress":
                self._screen.progress(event)

        meter = StageMeter(self._policy, str(self._store), self._folder.run_id)
        arguments = ["--tasks", str(tasks), "--n", str(n), "--split", split, "--round", str(round_)]
        arguments += ["--run", self._folder.run_id, "--policy-url", f"{self._policy.url}/v1", *self._collector()]
        arguments += ["--judge", settings.judge] if settings.judge else []
        assert self._settings.loop.target is not None
        target = self._settings.loop.target
        self._command(
            "rollout", arguments, [target] if is_function_name(target) else ["--", *shlex.split(target)], on_event
        )
        counts = meter.stop(result["total"], result["calls"])
        return Collected(result, [check.record() for check in stage_checks(counts)], time.monotonic() - began)

    def _evaluate(self, round_: int, count: int, *, probe: bool = False) -> None:
        """Validation after `round_`, and the hard probe with it; skipped where it is on record."""
        loop = self._settings.loop
        named: list[tuple[EvalName, list[str]]] = [("validation", self._tasks["val"])]
        if probe and loop.probe_tasks:
            named.append(("probe", task_lines(Path(loop.probe_tasks), "val")))
        on_record = {(record["name"], record["round"]) for record in self._folder.records() if record["kind"] == "eval"}
        for name, lines in named:
            if not lines or not count or (name, round_) in on_record:
                continue
            self._screen.stage("validation" if name == "validation" else "hard probe")
            tasks = self._folder.draw_tasks(f"{name}-{round_:04d}", lines, count, f"{loop.seed}-{name}-{count}")
            collected = self._collect(tasks, round_, "val", 1)
            record = {
                "kind": "eval",
                "name": name,
                "round": round_,
                "policy_version": self._policy.policy()["version"],
                "n": collected.result["rewarded"],
                "successes": (collected.result["mean_reward"] or 0.0) * collected.result["rewarded"],
                "status": collected.result["status"],
                "calls": collected.result["calls"],
                "seconds": collected.seconds,
                "checks": collected.checks,
            }
            self._folder.append(record)
            self._screen.record(record)

    def _round(self, round_: int) -> None:
        loop, began = self._settings.loop, time.monotonic()
        self._screen.round(round_, loop.rounds)
        checks: list[dict[str, Any]] = []
        rollout: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        manifest_path = self._folder.datasets / round_dir_name(round_) / MANIFEST
        if not manifest_path.exists():
            self._screen.stage("rollouts")
            tasks = self._folder.draw_tasks(
                f"round-{round_:04d}", self._tasks["train"], loop.tasks_per_round, f"{loop.seed}-{round_}"
            )
            collected = self._collect(tasks, round_, "train", self._settings.rollouts.n)
            checks += collected.checks
            rollout, seconds["rollouts"] = collected.result, collected.seconds
            self._screen.stage("dataset")
            seconds["dataset"] = self._dataset(round_)
        manifest = RunFolder(manifest_path.parent).read(MANIFEST)
        checks += [check.record() for check in dataset_checks(manifest)]
        self._screen.stage("training")
        trained_from = time.monotonic()
        event = self._trained(round_)
        seconds["train"] = time.monotonic() - trained_from
        checks += [check.record() for check in training_checks(event, self._settings.train.engine_mismatch)]
        seconds["total"] = time.monotonic() - began
        keys = ("rows", "rollouts", "groups", "calls_seen", "calls_kept", "dropped", "rewards")
        record = {
            "kind": "round",
            "round": round_,
            "policy_version": event.get("version"),
            "rollout": rollout,
            "dataset": {key: manifest.get(key) for key in keys},
            "train": event,
            "seconds": seconds,
            "checks": checks,
        }
        self._folder.append(record)
        self._screen.record(record)

    def _dataset(self, round_: int) -> float:
        began = time.monotonic()
        arguments = ["--store", str(self._store), "--out", str(self._folder.datasets)]
        arguments += ["--run", self._folder.run_id, "--round", str(round_), "--wait-s", "30", "--settle-s", "20"]
        self._command("dataset", arguments, [], lambda event: None)
        return time.monotonic() - began

    def _trained(self, round_: int) -> dict[str, Any]:
        """The trainer's event for the round's dataset, which the trainer finds by itself.

        Where the trainer used it before the loop (or the trainer) was killed, no event comes: its metrics then serve.
        """
        assert self._trainer is not None
        manifest = self._folder.datasets / round_dir_name(round_) / MANIFEST
        sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()
        while True:
            earlier = self._folder.trained_before(sha256)
            try:
                event = self._trainer.events.get(timeout=0.5)
            except queue.Empty:
                if earlier is not None:
                    return self._recovered(earlier)
                self._keep_alive()
                continue
            if event.get("event") == "round" and event.get("round") == round_:
                self._screen.policy(event.get("version"))
                return event

    def _recovered(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """An event from the trainer's metrics and what the policy server says of its last swap."""
        served = self._policy.policy()
        self._screen.policy(served["version"])
        tokens = {"trained": metrics.get("trained_tokens"), "forwarded": metrics.get("forwarded_tokens")}
        swap = {"version": served["version"], "canary": served["canary"]}
        skipped = metrics.get("skipped")
        return {**metrics, "event": "round", "recovered": True, "tokens": tokens, "swap": swap, "skipped": skipped}


def settings_record(settings: Settings) -> dict[str, Any]:
    """The settings as plain values, to tell whether a run may be resumed."""
    return asdict(settings)
