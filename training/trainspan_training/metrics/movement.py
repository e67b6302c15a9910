"""How far the policy has moved from version to version, as measured at the end of each round."""

import math
from collections.abc import Mapping
from pathlib import Path

from trainspan_training.checkpoints.ledger import CheckpointLedger
from trainspan_training.metrics.round_record import read

__all__ = ["Movement"]


class Movement:
    """Version → root mean square of Δ log-probability, from its parent to it, on a sample of its round's tokens.

    For small Δ, k3 is Δ²/2 (Schulman, "Approximating KL divergence"), so the root mean square is √(2 k3).
    """

    def __init__(self, known: Mapping[int, float]) -> None:
        self._known = dict(known)

    @classmethod
    def of(cls, checkpoints: Path) -> "Movement":
        """The movement of all rounds in `metrics.jsonl` that made a version; the numbers of refused ones moved nothing."""
        made = [line for line in read(checkpoints) if not line.get("error") and line.get("kl") is not None]
        known = {line["version"]: _root_mean_square(line["kl"]) for line in made}
        return cls({**dict.fromkeys(CheckpointLedger(checkpoints).refused_versions(), 0.0), **known})

    def add(self, version: int, kl: float) -> None:
        """Adds a version whose round ended with `kl` (k3 against its parent); 0 for one that was refused."""
        self._known[version] = _root_mean_square(kl)

    def since(self, earliest: int, current: int) -> float | None:
        """At most how far `current` is from `earliest`, on average over tokens; None if a round in between is unknown."""
        between = [self._known.get(version) for version in range(earliest + 1, current + 1)]
        return None if None in between else sum(value for value in between if value is not None)


def _root_mean_square(kl: float) -> float:
    return math.sqrt(2 * max(0.0, kl))
