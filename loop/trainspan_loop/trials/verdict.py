"""The verdict on a new version: its trial tasks compared with those of the version before, and the alarm for repeated refusals."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from trainspan_loop.checks.integrity import Check, left_out_check
from trainspan_loop.trials.comparison import Comparison, compare
from trainspan_loop.trials.evidence import Evidence
from trainspan_schemas.artifacts.run_records import RoundRecord, RunRecord, rounds_in

__all__ = ["MOST_IN_A_ROW", "Verdict", "judge", "refused_rounds", "verdict_checks"]

MOST_IN_A_ROW: Final = 2
"""Maximum number of refused versions in a row that chance explains; more have another cause."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a version that was swapped in."""

    version: int
    before: int | None
    """The version that it is compared with; None if there is none."""
    level: float
    """Greatest probability of refusing a version that is as good as the one before."""
    reward: Comparison | None = None
    """None if it was not judged."""
    finished: Comparison | None = None
    """Rollouts that ended with a reward (1), or failed or took too long (0); None if all of them ended with one."""
    unjudged: str | None = None
    """Why it was not judged."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Status → rollouts under the version that count in neither comparison: another than the agent failed, or nobody rewarded
    them."""
    rollouts: int = 0
    """Rollouts of trial tasks under the version, with these."""

    @property
    def is_worse(self) -> bool:
        """Whether one of the comparisons is worse beyond noise; two of them share the level equally."""
        compared = [comparison for comparison in (self.reward, self.finished) if comparison is not None]
        return any(comparison.p <= self.level / len(compared) for comparison in compared)

    @property
    def reason(self) -> str | None:
        """Why it is refused, in one line; None if it is not."""
        if not self.is_worse:
            return None
        compared = [("reward", self.reward), ("finished rollouts", self.finished)]
        figures = ", ".join(f"{name} {_figures(comparison)}" for name, comparison in compared if comparison is not None)
        return f"version {self.version} is worse than version {self.before}: {figures}"

    def record(self) -> Mapping[str, Any]:
        return {**asdict(self), "worse": self.is_worse}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Verdict":
        values = {name: value for name, value in record.items() if name != "worse"}
        for name in ("reward", "finished"):
            values[name] = None if values[name] is None else Comparison(**values[name])
        return cls(**values)


def judge(version: int, before: int, level: float, earlier: Evidence, later: Evidence) -> Verdict:
    """Compares a version with the one before, on the tasks that have outcomes under both."""
    failed = any(0.0 in outcomes for evidence in (earlier, later) for outcomes in evidence.finished.values())
    reward = compare(earlier.rewards, later.rewards, seed=version)
    finished = compare(earlier.finished, later.finished, seed=version) if failed else None
    why = None
    if not reward.tasks and finished is None:
        why = f"no trial task has a reward under version {before} and under version {version}"
    return Verdict(version, before, level, reward, finished, why, later.left_out, later.rollouts)


def refused_rounds(records: Sequence[RunRecord]) -> list[RoundRecord]:
    """The records of rounds whose version was refused."""
    return [record for record in rounds_in(records) if record.get("refused")]


def verdict_checks(records: Sequence[RunRecord], verdict: Verdict, failure: str | None) -> list[Check]:
    """Checks of the round after `records`: its version was judged, refusals are rare, and the version before is back.

    `failure` says why a refused version could not be taken out of service.
    """
    checks = [left_out_check(verdict.left_out, verdict.rollouts)] if verdict.rollouts else []
    checks.append(Check("the new version is judged", verdict.unjudged is None, verdict.unjudged or _detail(verdict)))
    if verdict.unjudged is not None:
        return checks
    in_a_row = 1 if verdict.is_worse else 0
    tried = [record for record in rounds_in(records) if record.get("trial")]
    for record in reversed(tried if in_a_row else []):
        if not record.get("refused"):
            break
        in_a_row += 1
    detail = f"refused, {in_a_row} in a row: {verdict.reason}" if in_a_row else "not refused"
    if in_a_row > MOST_IN_A_ROW:
        detail += "; training makes the policy worse: lower train.learning_rate, and look at rewards and advantages"
    checks.append(Check("new versions are accepted", in_a_row <= MOST_IN_A_ROW, detail))
    if in_a_row:
        back = f"version {verdict.before} is in service again"
        checks.append(Check("the version before is back", failure is None, failure or back))
    return checks


def _detail(verdict: Verdict) -> str:
    assert verdict.reward is not None, "judged"
    left_out = f", {sum(verdict.left_out.values())} of {verdict.rollouts} rollouts left out" if verdict.left_out else ""
    against = f"version {verdict.version} against version {verdict.before}"
    return f"{against}: reward {_figures(verdict.reward)}, level {verdict.level:g}{left_out}"


def _figures(comparison: Comparison) -> str:
    if comparison.before is None or comparison.after is None:
        return "unknown"
    return f"{comparison.before:.3f} → {comparison.after:.3f} on {comparison.tasks} tasks (p = {comparison.p:.2g})"
