"""Counts the rollouts of a run that are done."""

from collections import Counter
from dataclasses import dataclass, field

from trainspan_schemas.command_events import Progress
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["Totals"]


@dataclass(slots=True)
class Totals:
    """The rollouts that are done, of `total`."""

    total: int = 0
    status: Counter[str] = field(default_factory=Counter)
    rewarded: int = 0
    resumed: int = 0
    """Done by an earlier process of the run."""
    calls: int = 0
    unreported: int = 0
    """Attempts whose agents ended before they could report their calls: `calls` has those that the policy servers began."""
    groups: int = 0
    """Tasks of which all rollouts are done."""
    _reward_sum: float = 0.0
    _open: dict[tuple[int, str], int] = field(default_factory=dict)
    """(round, task id) → rollouts that are not done."""

    def begin_group(self, round_: int, task_id: str, n: int, *, is_new: bool) -> None:
        """Counts the `n` rollouts of a task as open; a task that `is_new` adds to the total."""
        self._open[round_, task_id] = n
        self.total += n if is_new else 0

    def add(
        self, round_: int, task_id: str, status: RolloutStatus, reward: float | None, *, resumed: bool = False
    ) -> None:
        self._open[round_, task_id] -= 1
        if not self._open[round_, task_id]:
            del self._open[round_, task_id]
            self.groups += 1
        self.status[status] += 1
        self.resumed += resumed
        if reward is not None:
            self.rewarded += 1
            self._reward_sum += reward

    def add_calls(self, calls: int | None, is_reported: bool) -> None:
        """Counts an attempt's model calls, as far as they are known."""
        self.calls += calls or 0
        self.unreported += not is_reported

    @property
    def mean_reward(self) -> float | None:
        """Over the rollouts with a reward."""
        return self._reward_sum / self.rewarded if self.rewarded else None

    def progress(self) -> Progress:
        done = self.status.total()
        return Progress(
            done,
            done - self.status["ok"],
            self.total,
            self.mean_reward,
            self.groups,
            min((round_ for round_, _ in self._open), default=None),
            dict(sorted(self.status.items())),
            self.rewarded,
            self.calls,
        )
