"""The loop itself: evaluate; in each round collect rollouts, build the dataset, train and swap; evaluate again."""

import json
import time
from pathlib import Path
from typing import Any

from trainspan_cli.loop.checks.integrity import Check, dataset_checks, reward_checks, training_checks
from trainspan_cli.loop.checks.skipping import skip_check, skip_reason, skipped_rounds
from trainspan_cli.loop.checks.stopping import stop_reason
from trainspan_cli.loop.processes.screen import Screen
from trainspan_cli.loop.processes.services import Services
from trainspan_cli.loop.processes.stages import Stages
from trainspan_cli.loop.sampling.choice import choose_sampler
from trainspan_cli.loop.sampling.sampler import is_followed_by_validation
from trainspan_cli.loop.state.reward_records import read_rewards
from trainspan_cli.loop.state.run_folder import RunFolder
from trainspan_cli.loop.state.task_pool import LoopTasks
from trainspan_cli.loop.validation import Validations
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.config.settings import Settings

__all__ = ["Loop"]


class Loop:
    """One run. `config` is passed to every child command; `folder` has the state needed to resume after a kill."""

    def __init__(
        self, settings: Settings, tasks: LoopTasks, config: Path | None, folder: RunFolder, screen: Screen
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._screen = screen
        self._services = Services(settings, config, folder, screen)
        stages = Stages(settings, self._services, folder, screen)
        self._stages = stages
        self._validation = Validations(settings, tasks, self._services, stages, folder, screen)
        self._sampler = choose_sampler(settings, tasks, stages, folder, screen)
        self._recorded_at = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Runs or resumes; returns the result record. Raises ProcessError, ConfigError, TaskFileError."""
        loop, folder = self._settings.loop, self._folder
        try:
            self._services.start()
            done = {record["round"] for record in folder.records() if record["kind"] == "round"}
            self._validation.run(0, loop.eval_tasks, probe=True)
            self._recorded_at = time.monotonic()
            round_, ended = 0, stop_reason(loop, folder.records(), 0)
            while ended is None:
                round_ += 1
                if round_ not in done:
                    self._sampler.begin(round_)
                    self._round(round_)
                if is_followed_by_validation(loop, round_):
                    self._sampler.between_rounds(self._validation.run, round_, loop.val_tasks)
                    self._recorded_at = time.monotonic()
                ended = stop_reason(loop, folder.records(), round_)
            self._screen.note(ended)
            untrained = self._sampler.stop()
            self._stages.resume()
            if untrained:
                self._screen.note(f"rollouts of {len(untrained)} later rounds were begun and are not trained")
            if skipped := skipped_rounds(folder.records()):
                self._screen.note(
                    f"{len(skipped)} of {round_} rounds were skipped, the last one: {skipped[-1]['skipped']}"
                )
            self._validation.run(round_, loop.eval_tasks, probe=True)
        finally:
            self._sampler.stop()
            self._services.stop()
            self._sampler.close()
        folder.finish("finished", ended=ended, untrained_rounds=untrained)
        return {"run_id": folder.run_id, "folder": str(folder.path), "records": folder.records()}

    def _round(self, round_: int) -> None:
        """Trains a round whose rollouts have begun, and records it."""
        self._screen.round(round_, self._settings.loop.rounds)
        sampled = self._sampler.take(round_)
        rollout, checks, seconds = sampled.rollout, list(sampled.checks), dict(sampled.seconds)
        if sampled.nothing is not None:
            version = self._services.policy.policy()["version"]
            self._end_round(round_, version, rollout, sampled.nothing, {}, seconds, checks)
            return
        dataset = dataset_dir(self._folder.datasets, round_)
        manifest = json.loads(manifest_path(dataset).read_bytes())
        checks += [check.record() for check in dataset_checks(manifest)]
        checks += [check.record() for check in self._reward_checks(round_, dataset)]
        self._screen.stage("training")
        trained_from = time.monotonic()
        event = self._stages.trained(round_)
        seconds["train"] = time.monotonic() - trained_from
        self._screen.stage("")
        checks += [check.record() for check in training_checks(event)]
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
        """Records the round, from its manifest (or its substitute) and the trainer's event, if there was one.

        Its `total` seconds are those since the record before, so that they add up to the run's time, overlapped or not.
        """
        skipped = skip_reason(manifest, event)
        checks = [*checks, skip_check(self._folder.records(), skipped).record()]
        keys = ("rows", "rollouts", "groups", "calls_seen", "calls_kept", "dropped", "rewards")
        recorded_at = time.monotonic()
        record = {
            "kind": "round",
            "round": round_,
            "policy_version": version,
            "skipped": skipped,
            "rollout": rollout,
            "dataset": {key: manifest.get(key) for key in keys},
            "train": event,
            "seconds": {**seconds, "total": recorded_at - self._recorded_at},
            "checks": checks,
        }
        self._recorded_at = recorded_at
        self._folder.append(record)
        self._screen.record(record)

    def _reward_checks(self, round_: int, dataset: Path) -> list[Check]:
        rewards = read_rewards(self._sampler.ledgers(round_), dataset)
        return [] if rewards is None else reward_checks(rewards)
