"""Counts the rollouts of a run that are done."""

from collections import Counter
from dataclasses import dataclass, field

from trainspan_rollouts.records import Progress
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["Totals"]


@dataclass(slots=True)
class Totals:
    """The rollouts that are done, of `total`."""

    total: int
    status: Counter[str] = field(default_factory=Counter)
    rewarded: int = 0
    resumed: int = 0
    """Done by an earlier process of the run."""
    calls: int = 0
    _reward_sum: float = 0.0

    def add(self, status: RolloutStatus, reward: float | None, *, resumed: bool = False) -> None:
        self.status[status] += 1
        self.resumed += resumed
        if reward is not None:
            self.rewarded += 1
            self._reward_sum += reward

    def add_calls(self, calls: int) -> None:
        self.calls += calls

    @property
    def mean_reward(self) -> float | None:
        """Over the rollouts with a reward."""
        return self._reward_sum / self.rewarded if self.rewarded else None

    def progress(self) -> Progress:
        done = self.status.total()
        return Progress(done, done - self.status["ok"], self.total, self.mean_reward)
