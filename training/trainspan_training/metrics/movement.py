"""How far the policy has moved from version to version, as measured at the end of each round."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainspan_training.metrics.round_record import read_records

__all__ = ["Movement"]


class Movement:
    """Version → root mean square of Δ log-probability, from its parent to it, on a sample of its round's tokens.

    For small Δ, k3 is Δ²/2 (Schulman, "Approximating KL divergence"), so the root mean square is √(2 k3).
    """

    def __init__(self, known: Mapping[int, float]) -> None:
        self._known = dict(known)

    @classmethod
    def of(cls, checkpoints: Path) -> "Movement":
        """The movement of all rounds in `metrics.jsonl` that made a version."""
        rounds = [line for line in read_records(checkpoints) if not line.get("error") and line.get("kl") is not None]
        return cls({line["version"]: _root_mean_square(line["kl"]) for line in rounds})

    def add(self, version: int, kl: float) -> None:
        """Adds a version whose round ended with `kl` (k3 against its parent)."""
        self._known[version] = _root_mean_square(kl)

    def along(self, updates: Iterable[int]) -> float | None:
        """At most how far policies are apart that differ by the updates to these versions, on average over tokens.

        None if one of them is unknown.
        """
        between = [self._known.get(version) for version in updates]
        return None if None in between else sum(value for value in between if value is not None)


def _root_mean_square(kl: float) -> float:
    return math.sqrt(2 * max(0.0, kl))
