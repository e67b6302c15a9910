"""What became of the records of the files: counts by name, with examples of those that were left out."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Account"]

_MOST_EXAMPLES: Final = 5
_MOST_REASONS: Final = 50
"""Names of kinds come from the files; beyond this number they are counted together."""


@dataclass(slots=True)
class Account:
    """Of all files of one format."""

    format: str
    files: int = 0
    records: int = 0
    spans: int = 0
    rollouts: int = 0
    """Traces that were made a rollout at their root span."""
    own_rollouts: int = 0
    """Traces with a root span whose spans name their rollouts: they are sent as they are."""
    evaluations: int = 0
    logs: int = 0
    """Log records that are no evaluations."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason → number of records, or parts of them, that became nothing."""
    examples: list[str] = field(default_factory=list)
    """`FILE:LINE: REASON` of the first ones that have a place."""

    def leave_out(self, reason: str, place: str | None = None, n_parts: int = 1) -> None:
        """Counts what became nothing; `place` is `FILE:LINE: what is wrong`."""
        if n_parts:
            is_known = reason in self.left_out or len(self.left_out) < _MOST_REASONS
            self.left_out[reason if is_known else "other"] += n_parts
        if place is not None and len(self.examples) < _MOST_EXAMPLES:
            self.examples.append(place)
