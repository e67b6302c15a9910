"""The end of a run: supervised training on its own successes, from its best version, kept if validation does not fall.

Each step leaves a file or a record, so that a loop that was killed at any point continues: `consolidation.json` has the start, and
the version once it is swapped in; `trainspan sft` continues from its own states; the validation's record has the decision, and a
version that is not kept is taken out of service after it.
"""

import time
from pathlib import Path
from typing import Final, cast

from trainspan_loop.checks.integrity import SIGNAL_CHECK, swap_check
from trainspan_loop.checks.stopping import best_validation
from trainspan_loop.processes.child_processes import Commands
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.services import Services
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import LoopTasks
from trainspan_loop.trials.lineage import is_in_service
from trainspan_loop.trials.trials import put_back
from trainspan_loop.validation import Validations
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, checkpoint_name, read_latest
from trainspan_schemas.artifacts.run_records import (
    ConsolidatedVersion,
    ConsolidationRecord,
    ConsolidationStart,
    EvalRecord,
    evaluations_in,
    rounds_in,
)
from trainspan_schemas.command_events import Event, FineTuned, FineTuneStep, RoundTrained
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, ProcessError
from trainspan_schemas.intervals import RewardEstimate
from trainspan_training.checkpoints.ledger import CheckpointLedger

__all__ = ["Consolidation", "check_consolidation"]

_STATE: Final = "consolidation.json"


def check_consolidation(settings: Settings, tasks: LoopTasks) -> None:
    """Raises ConfigError if the settings ask for consolidation and this run cannot have it."""
    if settings.loop.consolidate and (why := _unfit(settings, tasks)):
        raise ConfigError(f"[loop] consolidate = true: {why}")


def _unfit(settings: Settings, tasks: LoopTasks) -> str | None:
    """Why runs with these settings cannot be consolidated."""
    if settings.policies:
        return "[policies] has several policies, and supervised training is of one"
    if settings.model.adapter != "none":
        return f"[model] adapter = {settings.model.adapter!r}, and supervised training starts from a whole model"
    if not tasks.val or not settings.loop.eval_tasks:
        return "there are no validation tasks ([loop] eval_tasks) that could tell whether it helps"
    return None


class Consolidation:
    """That of one run."""

    def __init__(
        self,
        settings: Settings,
        tasks: LoopTasks,
        services: Services,
        validation: Validations,
        folder: RunFolder,
        screen: Screen,
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._services = services
        self._validation = validation
        self._folder = folder
        self._screen = screen

    def run(self, round_: int) -> str | None:
        """Trains, validates and decides after the last round, unless all of that is done; returns why nothing was trained, if it was to be.

        Raises ProcessError if a version that is not kept cannot be taken out of service: a resumed run tries again.
        """
        if not self._settings.loop.consolidate:
            return None
        if (why := _unfit(self._settings, self._tasks)) is not None:
            return why
        if (before := self._last_validation(round_)) is None:
            return "the last validation has no rewards"
        if read_latest(self._folder.checkpoints) is None:
            return "no round was trained"
        last = rounds_in(self._folder.records())[-1:]
        if any(check["name"] == SIGNAL_CHECK and not check["ok"] for record in last for check in record["checks"]):
            return "its rewards look independent of the answers"
        try:
            consolidated = self._trained()
        except ProcessError as error:
            return str(error)
        decisions = [record.get("consolidation") for record in evaluations_in(self._folder.records())]
        decision = next(filter(None, decisions), None) or self._decision(before, consolidated)
        if not decision["kept"]:
            self._take_out(consolidated["version"])
        return None

    def _last_validation(self, round_: int) -> EvalRecord | None:
        validations = evaluations_in(self._folder.records(), "validation")
        return next((record for record in reversed(validations) if record["round"] == round_ and record["n"]), None)

    def _trained(self) -> ConsolidatedVersion:
        """What was trained. Raises ProcessError if `trainspan sft` failed."""
        state = self._folder.read(_STATE)
        if "version" in state:
            return cast("ConsolidatedVersion", state)
        start = cast("ConsolidationStart", state) if state else self._start()
        if not state:
            self._folder.write(_STATE, start)
        began, services, settings = time.monotonic(), self._services, self._settings
        self._screen.stage("training on the run's successes")
        services.stop_trainers()
        if settings.serving.sleep:
            services.policy.sleep()
        out = self._folder.path / "consolidated"
        arguments = ["sft", "--dataset", str(self._folder.datasets), "--form", "text", "--out", str(out)]
        arguments += ["--min-reward", str(settings.loop.success_reward), "--model", start["model"]]
        arguments += ["--adapter", "none", "--lora-result", "merged", "--device", settings.model.device]
        arguments += ["--seed", str(settings.train.seed), "--checkpoints", str(self._folder.checkpoints)]
        arguments += ["--policy-url", services.policy.url, *services.config, "--format", "json"]
        events: list[Event] = []

        def on_event(event: Event) -> None:
            events.append(event)
            if isinstance(event, FineTuneStep):
                self._screen.training(event, None)

        log = self._folder.logs / "sft.log"
        code, message = Commands().run(arguments, services.beside_server, log, on_event)
        self._screen.stage("")
        done = next((event for event in events if isinstance(event, FineTuned)), None)
        if code or done is None:
            raise ProcessError(f"{message.removeprefix('trainspan: ')} (log: {log})")
        trained = _described(start, done, time.monotonic() - began)
        self._folder.write(_STATE, trained)
        return trained

    def _start(self) -> ConsolidationStart:
        """The best version by validation: its number, and the folder or name of the model."""
        best = best_validation(self._folder.records())
        assert best is not None, "there is a validation with rewards"
        version, best_kept = best["policy_version"], self._folder.best()
        assert version is not None, "there is one policy"
        folder = self._folder.checkpoints / checkpoint_name(version)
        if best_kept is not None and best_kept["policy_version"] == version:
            folder = Path(best_kept["checkpoint"])
        elif CheckpointLedger(self._folder.checkpoints).of_checkpoint(folder.name) is None:
            model = self._settings.train.model or self._settings.serving.model
            assert model is not None, "the policy server was started with it"
            return {"start": version, "model": model}
        elif not folder.is_dir():  # pruned before it could be kept
            latest = read_latest(self._folder.checkpoints)
            assert latest is not None, "a round was trained"
            version, folder = CheckpointMeta.read(latest).version, latest
        return {"start": version, "model": str(folder)}

    def _decision(self, before: EvalRecord, consolidated: ConsolidatedVersion) -> ConsolidationRecord:
        """Validates the version, and appends the record with the decision.

        The mean on the same tasks decides. A test at a level would keep most versions that are worse.
        """
        record = self._validation.again(before)
        now = self._services.policy.state().alone
        swap = {"version": now.version, "canary": now.canary}
        fresh = swap_check(RoundTrained(before["round"], consolidated["version"], swap=swap, recovered=True))
        estimate = RewardEstimate.of_record(record)
        is_kept = estimate.n > 0 and estimate.mean >= RewardEstimate.of_record(before).mean and fresh.ok
        record["checks"].append(fresh.record())
        record["seconds"] += consolidated["seconds"]
        names = ("n", "mean", "deviation", "binary")
        decision: ConsolidationRecord = {
            **consolidated,
            "before": {name: value for name, value in before.items() if name in names},
            "kept": is_kept,
        }
        record["consolidation"] = decision
        self._validation.append(record)
        return decision

    def _take_out(self, version: int | None) -> None:
        assert version is not None, "it was swapped in"
        root, name = self._folder.checkpoints, checkpoint_name(version)
        if not is_in_service(root, name):
            return
        parent = CheckpointMeta.read(root / name).parent or ""
        before = CheckpointMeta.read(root / parent).version
        self._screen.note(f"validation fell: version {before} goes back in service in place of version {version}")
        if (failure := put_back(before, self._services, self._settings, self._folder)) is not None:
            raise ProcessError(f"version {version} is worse and still in service: {failure}")
        self._screen.policy(before)


def _described(start: ConsolidationStart, done: FineTuned, seconds: float) -> ConsolidatedVersion:
    manifest = done.manifest
    return {
        **start,
        "version": done.version,
        "examples": manifest["examples"],
        "answers": manifest["answers"],
        "dropped": manifest["dropped"],
        "steps": manifest["steps"],
        "learning_rate": manifest["learning_rate"],
        "trained_tokens": round(manifest["epochs"] * manifest["trained_tokens"]),
        "forwarded_tokens": round(manifest["epochs"] * manifest["tokens"]),
        "seconds": seconds,
    }
