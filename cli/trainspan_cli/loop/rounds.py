"""The loop itself: evaluate; in each round collect rollouts, build the dataset, train and swap; evaluate again."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from trainspan_cli.loop.checks.integrity import Check, dataset_checks, reward_checks, training_checks
from trainspan_cli.loop.checks.pass_at import pass_at
from trainspan_cli.loop.checks.skipping import skip_check, skip_reason, skipped_rounds
from trainspan_cli.loop.checks.stopping import best_validation, stop_reason
from trainspan_cli.loop.processes.screen import Screen
from trainspan_cli.loop.processes.services import Services
from trainspan_cli.loop.processes.stages import Stages
from trainspan_cli.loop.state.reward_records import read_rewards
from trainspan_cli.loop.state.run_folder import RunFolder
from trainspan_cli.loop.state.task_pool import LoopTasks, TaskPool
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.intervals import Estimate

__all__ = ["Loop", "settings_record"]

EvalName = Literal["validation", "probe"]


class Loop:
    """One run. `config` is passed to every child command; `folder` has the state needed to resume after a kill."""

    def __init__(
        self, settings: Settings, tasks: LoopTasks, config: Path | None, folder: RunFolder, screen: Screen
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._screen = screen
        self._services = Services(settings, config, folder, screen)
        self._stages = Stages(settings, self._services, folder, screen)
        self._tasks = tasks

    def run(self) -> dict[str, Any]:
        """Runs or resumes; returns the result record. Raises ProcessError, ConfigError, TaskFileError."""
        loop, folder = self._settings.loop, self._folder
        try:
            self._services.start()
            done = {record["round"] for record in folder.records() if record["kind"] == "round"}
            self._evaluate(0, loop.eval_tasks, probe=True)
            round_, ended = 0, stop_reason(loop, folder.records(), 0)
            while ended is None:
                round_ += 1
                if round_ not in done:
                    self._round(round_)
                if loop.eval_every and round_ % loop.eval_every == 0 and round_ < loop.rounds:
                    self._evaluate(round_, loop.val_tasks)
                ended = stop_reason(loop, folder.records(), round_)
            self._screen.note(ended)
            if skipped := skipped_rounds(folder.records()):
                self._screen.note(
                    f"{len(skipped)} of {round_} rounds were skipped, the last one: {skipped[-1]['skipped']}"
                )
            self._evaluate(round_, loop.eval_tasks, probe=True)
        finally:
            self._services.stop()
        folder.finish("finished", ended=ended)
        return {"run_id": folder.run_id, "folder": str(folder.path), "records": folder.records()}

    def _evaluate(self, round_: int, count: int, *, probe: bool = False) -> None:
        """Runs the validation after `round_`, and with `probe` the hard probe, unless they are recorded already."""
        loop = self._settings.loop
        named: list[tuple[EvalName, TaskPool]] = [("validation", self._tasks.val)]
        if probe and self._tasks.probe:
            named.append(("probe", self._tasks.probe))
        on_record = {
            (record["name"], record["round"], record["tasks"])
            for record in self._folder.records()
            if record["kind"] == "eval"
        }
        for name, pool in named:
            drawn = min(count, len(pool))
            if not drawn or (name, round_, drawn) in on_record:
                continue
            self._screen.stage("validation" if name == "validation" else "hard probe")
            tasks = self._folder.draw_tasks(f"{name}-{round_:04d}-{drawn}", pool, count, f"{loop.seed}-{name}-{count}")
            collected = self._stages.collect(tasks, round_, "val", loop.eval_n)
            served = self._services.policy.policy()
            record = {
                "kind": "eval",
                "name": name,
                "round": round_,
                "policy_version": served["version"],
                "tasks": drawn,
                **self._measured(round_),
                "status": collected.result["status"],
                "calls": collected.result["calls"],
                "seconds": collected.seconds,
                "checks": collected.checks,
            }
            self._folder.append(record)
            self._screen.record(record)
            *_, last = records = self._folder.records()
            if (
                best_validation(records) is last
                and loop.keep_best
                and (self._folder.checkpoints / served["checkpoint"]).is_dir()
            ):
                self._folder.keep_best(served["checkpoint"], record)

    def _measured(self, round_: int) -> dict[str, Any]:
        """The estimate of the last validation, and pass@k if each task was rolled out several times.

        It is computed from the runner's ledger, so that it includes no rewards from outside the validation.
        """
        from trainspan_rollouts.run_ledger import ledger_file, task_rewards

        rewards = task_rewards(ledger_file(self._folder.run_id, round_, "val")).values()
        record = Estimate.of(rewards).record()
        if self._settings.loop.eval_n > 1:
            solved = self._settings.loop.success_reward
            record["pass_at"] = pass_at([[value >= solved for value in values] for values in rewards])
        return record

    def _round(self, round_: int) -> None:
        loop, began = self._settings.loop, time.monotonic()
        self._screen.round(round_, loop.rounds)
        checks: list[dict[str, Any]] = []
        rollout: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        if not dataset_dir(self._folder.datasets, round_).exists():
            self._screen.stage("rollouts")
            tasks = self._folder.draw_tasks(
                f"round-{round_:04d}", self._tasks.train, loop.tasks_per_round, f"{loop.seed}-{round_}"
            )
            collected = self._stages.collect(tasks, round_, "train", self._settings.rollouts.n)
            checks += collected.checks
            rollout, seconds["rollouts"] = collected.result, collected.seconds
            self._screen.stage("dataset")
            built = self._stages.dataset(round_, are_stored=collected.is_stored)
            seconds["dataset"] = built.seconds
            if built.nothing is not None:
                seconds["total"] = time.monotonic() - began
                version = self._services.policy.policy()["version"]
                self._end_round(round_, version, rollout, built.nothing, {}, seconds, checks)
                return
        dataset = dataset_dir(self._folder.datasets, round_)
        manifest = json.loads(manifest_path(dataset).read_bytes())
        checks += [check.record() for check in dataset_checks(manifest)]
        checks += [check.record() for check in self._reward_checks(round_, dataset)]
        self._screen.stage("training")
        trained_from = time.monotonic()
        event = self._stages.trained(round_)
        seconds["train"] = time.monotonic() - trained_from
        checks += [check.record() for check in training_checks(event)]
        seconds["total"] = time.monotonic() - began
        self._end_round(round_, event.get("version"), rollout, manifest, event, seconds, checks)

    def _end_round(
        self,
        round_: int,
        version: int | None,
        rollout: dict[str, Any],
        manifest: dict[str, Any],
        event: dict[str, Any],
        seconds: dict[str, float],
        checks: list[dict[str, Any]],
    ) -> None:
        """Records the round, from its manifest (or its substitute) and the trainer's event, if there was one."""
        skipped = skip_reason(manifest, event)
        checks = [*checks, skip_check(self._folder.records(), skipped).record()]
        keys = ("rows", "rollouts", "groups", "calls_seen", "calls_kept", "dropped", "rewards")
        record = {
            "kind": "round",
            "round": round_,
            "policy_version": version,
            "skipped": skipped,
            "rollout": rollout,
            "dataset": {key: manifest.get(key) for key in keys},
            "train": event,
            "seconds": seconds,
            "checks": checks,
        }
        self._folder.append(record)
        self._screen.record(record)

    def _reward_checks(self, round_: int, dataset: Path) -> list[Check]:
        from trainspan_rollouts.run_ledger import ledger_file

        rewards = read_rewards(ledger_file(self._folder.run_id, round_, "train"), dataset)
        return [] if rewards is None else reward_checks(rewards)


def settings_record(settings: Settings) -> dict[str, Any]:
    """The settings as plain values, to decide whether a run may be resumed."""
    return asdict(settings)
