"""Runs planned branches with the ordinary runner and measures the values of their states."""

import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Final

from trainspan_cli.branching.planning import BranchPlan
from trainspan_processing.branches.candidates import measure
from trainspan_processing.branches.stored_calls import StoredCallReader
from trainspan_processing.branches.values import BranchedRollout
from trainspan_processing.read.source import Source
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.command_events import BranchesMeasured, Progress, RunResult
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.telemetry import keys

__all__ = ["BranchReport", "branch_rollouts", "sampled_tokens"]

_STABLE_S: Final = 0.5
_PATIENCE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class BranchReport:
    """The result of a run of branches."""

    run: RunResult
    rollouts: tuple[BranchedRollout, ...]
    states: int
    """States that branches began at."""
    skipped_states: dict[str, int]
    """Reason → states that branches cannot begin at."""
    skipped: dict[str, int]
    sampled_tokens: int
    """Tokens that the server sampled for the branches; repeated answers cost none."""

    @property
    def diverged(self) -> float:
        """Share of the branches that did not follow their rollout."""
        return self.run.status.get("diverged", 0) / self.run.total if self.run.total else 0.0

    @property
    def unmeasured(self) -> int:
        """States without a value, because branches ended without a reward."""
        return sum(call.unrewarded > 0 for rollout in self.rollouts for call in rollout.calls)

    @property
    def unrewarded(self) -> int:
        """Branches that ended without a reward: ok, or by a failure that may be the policy's doing."""
        return sum(call.unrewarded for rollout in self.rollouts for call in rollout.calls)

    @property
    def of_other_policies(self) -> int:
        """Rollouts whose branches another policy version sampled."""
        return sum(rollout.is_other_policy for rollout in self.rollouts)

    def event(self) -> BranchesMeasured:
        """What the command tells programs."""
        return BranchesMeasured(
            run=asdict(self.run),
            rollouts=[rollout.record() for rollout in self.rollouts],
            states=self.states,
            skipped_states=self.skipped_states,
            skipped=self.skipped,
            diverged=self.diverged,
            unmeasured=self.unmeasured,
            unrewarded=self.unrewarded,
            of_other_policies=self.of_other_policies,
            sampled_tokens=self.sampled_tokens,
        )


def branch_rollouts(
    source: Source,
    plan: BranchPlan,
    settings: RunSettings,
    dataset: DatasetSettings,
    on_progress: Callable[[Progress], None],
) -> BranchReport:
    """Runs the branches; `settings` are the runner's, whose tasks are the plan's points."""
    reader = StoredCallReader(source, plan.candidates.calls)
    result = run_rollouts(_with_reader(settings, plan, reader), on_progress)
    sampled = sampled_tokens(source, settings.run_id, {point.round for point in plan.points})
    rollouts = measure(source, settings.run_id, plan.points, plan.candidates, dataset, now_ns=time.time_ns())
    return BranchReport(
        result, tuple(rollouts), len(plan.points), dict(plan.skipped_states), dict(plan.skipped), sampled
    )


def _with_reader(settings: RunSettings, plan: BranchPlan, reader: StoredCallReader) -> RunSettings:
    agent = plan.agent
    return replace(
        settings,
        tasks=plan.file,
        target=agent.target,
        harness=agent.harness,
        workspace=agent.workspace,
        judge=plan.judge,
        branches=reader,
    )


def sampled_tokens(source: Source, run_id: str, rounds: Collection[int]) -> int:
    """The tokens that the branches of these rounds sampled; repeated answers do not count.

    Waits a moment for the last calls: the policy server exports them a tenth of a second after their end.
    """
    quoted = run_id.replace("'", "''")
    sql = f"""SELECT coalesce(sum(len(c.completion_ids)), 0)::BIGINT AS tokens
        FROM calls c JOIN spans s USING (trace_id, span_id)
        JOIN rollouts r ON r.rollout_id = c.rollout_id AND r.attempt = c.attempt
        WHERE r.run_id = '{quoted}' AND coalesce(r.round, 0) IN ({", ".join(map(str, sorted(rounds)))})
        AND regexp_matches(r.task_id, '{BRANCH_TASK}')
        AND s.attributes NOT LIKE '%"{keys.CALL_FORCED}":true%'"""
    deadline, seen = time.monotonic() + _PATIENCE_S, -1
    while True:
        now = sum(int(batch["tokens"][0]) for batch in source.query(sql))
        if now == seen or time.monotonic() > deadline:
            return now
        seen = now
        time.sleep(_STABLE_S)
