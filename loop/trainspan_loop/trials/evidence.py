"""The outcomes of the trial tasks under each version, in the run's folder `trials/`, a file for each time they were rolled out."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from trainspan_loop.state.run_folder import RunFolder
from trainspan_rollouts.ledger.recorded import task_outcomes
from trainspan_schemas.intervals import MOST_LEFT_OUT

__all__ = ["TRIALS", "Evidence", "EvidenceFiles", "read_outcomes"]

TRIALS: Final = "trials"
_FAILED: Final = frozenset({"agent_error", "context_overflow", "timeout"})
"""Statuses that a worse policy can cause; rollouts with any other status but `ok` say nothing about it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Outcomes under one version, by task."""

    rewards: dict[str, list[float]]
    """Rewards of the rollouts that have one."""
    finished: dict[str, list[float]]
    """1 for each of these rollouts, 0 for each that the agent failed or that took too long."""
    left_out: dict[str, int]
    """Number of other rollouts by status: their infrastructure or judge failed, or nobody rewarded them."""

    @property
    def rollouts(self) -> int:
        """All of them."""
        return sum(map(len, self.finished.values())) + sum(self.left_out.values())

    @property
    def stands(self) -> bool:
        """Whether few enough are left out for the others to say something."""
        return sum(self.left_out.values()) <= MOST_LEFT_OUT * self.rollouts

    def joined(self, other: "Evidence") -> "Evidence":
        return Evidence(
            _joined(self.rewards, other.rewards),
            _joined(self.finished, other.finished),
            dict(Counter(self.left_out) + Counter(other.left_out)),
        )


def read_outcomes(ledger: Path) -> Evidence:
    """The outcomes in a runner's ledger."""
    rewards: dict[str, list[float]] = {}
    finished: dict[str, list[float]] = {}
    left_out: Counter[str] = Counter()
    for task, outcomes in task_outcomes(ledger).items():
        for outcome in outcomes:
            if outcome.reward is not None:
                rewards.setdefault(task, []).append(outcome.reward)
                finished.setdefault(task, []).append(1.0)
            elif outcome.status in _FAILED:
                finished.setdefault(task, []).append(0.0)
            else:
                left_out[outcome.unrewarded] += 1
    return Evidence(rewards, finished, dict(left_out))


def _joined(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {
        task: [*one.get(task, ()), *other.get(task, ())]
        for task in (*one, *(task for task in other if task not in one))
    }


class EvidenceFiles:
    """What the run has on its versions. A file is written once, after its rollouts have ended."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def of_version(self, version: int) -> Evidence | None:
        """All outcomes under a version; None if its trial tasks were never rolled out."""
        parts = [self._read(path) for path in sorted((self._folder.path / TRIALS).glob(f"round-*-{_suffix(version)}"))]
        return None if not parts else _all(parts)

    def has(self, round_: int, version: int) -> bool:
        return (self._folder.path / _name(round_, version)).exists()

    def keep(self, round_: int, version: int, evidence: Evidence) -> None:
        """Keeps what was seen under a version after a round (0: before the first)."""
        (self._folder.path / TRIALS).mkdir(exist_ok=True)
        self._folder.write(_name(round_, version), asdict(evidence))

    def _read(self, path: Path) -> Evidence:
        return Evidence(**self._folder.read(f"{TRIALS}/{path.name}"))


def _all(parts: Iterable[Evidence]) -> Evidence:
    whole = Evidence({}, {}, {})
    for part in parts:
        whole = whole.joined(part)
    return whole


def _suffix(version: int) -> str:
    return f"version-{version:06d}.json"


def _name(round_: int, version: int) -> str:
    return f"{TRIALS}/round-{round_:04d}-{_suffix(version)}"
