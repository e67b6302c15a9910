"""Validations and the hard probe: held-out tasks rolled out under one policy."""

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainspan_loop.checks.integrity import left_out_check, version_check
from trainspan_loop.checks.pass_at import pass_at
from trainspan_loop.checks.stopping import best_validation
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.services import Services
from trainspan_loop.processes.stages import Stages
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import LoopTasks, TaskPool
from trainspan_schemas.artifacts.checkpoint import checkpoint_name
from trainspan_schemas.artifacts.run_records import EvalName, EvalRecord, ServedVersions, evaluations_in
from trainspan_schemas.config.policy_scope import Policy
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.home import policy_dir
from trainspan_schemas.intervals import RewardEstimate
from trainspan_schemas.policy_server import ServerState
from trainspan_training.checkpoints.ledger import CheckpointLedger

__all__ = ["Validations"]

_TITLES: Final[Mapping[EvalName, str]] = {"validation": "validation", "probe": "hard probe"}


class Validations:
    """The validations of one run, each recorded once. No swap and no training rollouts may happen meanwhile; users of a live loop may."""

    def __init__(
        self,
        settings: Settings,
        tasks: LoopTasks,
        services: Services,
        stages: Stages,
        folder: RunFolder,
        screen: Screen,
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._services = services
        self._stages = stages
        self._folder = folder
        self._screen = screen

    def run(self, round_: int, count: int, *, probe: bool = False) -> float:
        """Runs the validation after `round_`, and with `probe` the hard probe, unless they are recorded already.

        Returns the seconds on their records.
        """
        recorded_s = 0.0
        loop = self._settings.loop
        self._keep_best()
        pools: list[tuple[EvalName, TaskPool]] = [("validation", self._tasks.val)] if self._tasks.val else []
        if probe and self._tasks.probe:
            pools.append(("probe", self._tasks.probe))
        on_record = {
            (record["name"], record["round"], record["tasks"]) for record in evaluations_in(self._folder.records())
        }
        for name, pool in pools:
            drawn = min(count, len(pool))
            if not drawn or (name, round_, drawn) in on_record:
                continue
            tasks = self._folder.draw_tasks(f"{name}-{round_:04d}-{drawn}", pool, count, f"{loop.seed}-{name}-{count}")
            record = self._evaluated(name, round_, tasks, drawn)
            self._folder.append(record)
            self._screen.record(record)
            self._keep_best()
            recorded_s += record["seconds"]
        return recorded_s

    def _evaluated(self, name: EvalName, round_: int, tasks: Path, drawn: int) -> EvalRecord:
        self._screen.collecting(_TITLES[name], round_)
        self._services.level_servers()
        began_ns = time.time_ns()
        collected = self._stages.collect(tasks, round_, "val", self._settings.loop.eval_n)
        ended_ns = time.time_ns()
        self._screen.collecting("", round_)
        state = self._services.policy.state()
        in_service = {policy: state.of(policy).version for policy in self._stages.policies}
        rewards, left_out = self._outcomes(round_)
        estimate, served = RewardEstimate.of(rewards).record(), self._versions(state)
        versions = version_check(collected.versions, in_service)
        record: EvalRecord = {
            "kind": "eval",
            "name": name,
            "round": round_,
            "policy_version": served["policy_version"],
            "tasks": drawn,
            "n": estimate["n"],
            "mean": estimate["mean"],
            "deviation": estimate["deviation"],
            "binary": estimate["binary"],
            "n_rollouts": estimate["n_rollouts"],
            "left_out": estimate["left_out"],
            "status": collected.result.status,
            "calls": collected.result.calls,
            "seconds": collected.seconds,
            "began_ns": began_ns,
            "ended_ns": ended_ns,
            "checks": [
                *collected.checks,
                versions.record(),
                left_out_check(left_out, estimate["n_rollouts"]).record(),
            ],
        }
        if "policies" in served:
            record["policies"] = served["policies"]
        if self._settings.loop.eval_n > 1:
            solved = self._settings.loop.success_reward
            known = [[value for value in values if value is not None] for values in rewards]
            record["pass_at"] = pass_at([[value >= solved for value in values] for values in known if values])
        return record

    def _versions(self, state: ServerState) -> ServedVersions:
        """The versions in service."""
        versions: dict[Policy, ServedVersions] = {
            policy: {"policy_version": state.of(policy).version} for policy in self._stages.policies
        }
        alone = versions.get(None)
        return alone or {"policy_version": None, "policies": versions}

    def _keep_best(self) -> None:
        """Keeps the checkpoints of the best validation on record, also if an earlier loop ended before it could.

        Does nothing if one of them was pruned since.
        """
        best = best_validation(self._folder.records())
        if best is None or self._is_kept(best):
            return
        folders = {policy: policy_dir(self._folder.checkpoints, policy) for policy in self._stages.policies}
        names = {policy: name for policy, name in _checkpoints(best).items() if _is_made_in(folders[policy], name)}
        if names and all((folders[policy] / name).is_dir() for policy, name in names.items()):
            self._folder.keep_best(names, best)

    def _is_kept(self, validation: EvalRecord) -> bool:
        best = self._folder.best()
        if best is None:
            return False
        return (best["round"], best["n"], best["mean"]) == (validation["round"], validation["n"], validation["mean"])

    def _outcomes(self, round_: int) -> tuple[list[list[float | None]], Counter[str]]:
        """The rewards of each task of the last validation, and why rollouts of it have none → rollouts.

        They come from the runner's ledger, which has no rewards from outside the validation.
        """
        from trainspan_rollouts.ledger.paths import ledger_files
        from trainspan_rollouts.ledger.recorded import task_outcomes

        ledgers = ledger_files(self._folder.run_id, round_, "val")
        tasks = [outcomes for file in ledgers for outcomes in task_outcomes(file).values()]
        rewards = [[outcome.reward for outcome in outcomes] for outcomes in tasks]
        left_out = Counter(outcome.unrewarded for outcomes in tasks for outcome in outcomes if outcome.reward is None)
        return rewards, left_out


def _checkpoints(validation: EvalRecord) -> dict[Policy, str]:
    """The names of the checkpoints that answered a validation."""
    policies: Mapping[Policy, ServedVersions] = validation.get("policies") or {None: validation}
    versions = {policy: served["policy_version"] for policy, served in policies.items()}
    return {policy: checkpoint_name(version) for policy, version in versions.items() if version is not None}


def _is_made_in(folder: Path, checkpoint: str) -> bool:
    """Whether the checkpoint was made or published there; the model that the run starts from was not."""
    return CheckpointLedger(folder).of_checkpoint(checkpoint) is not None
