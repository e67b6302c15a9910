"""Which version was trained from which, and how many updates lie between two of them.

Their numbers do not say it: refused and withdrawn versions leave gaps, because no number is used twice.
"""

from collections.abc import Mapping

from trainspan_training.checkpoints.folder import version_in
from trainspan_training.checkpoints.ledger import CheckpointLedger

__all__ = ["Lineage"]


class Lineage:
    """Version → the version that it was trained from."""

    def __init__(self, parents: Mapping[int, int]) -> None:
        self._parents = dict(parents)
        self._known = {*self._parents, *self._parents.values()}

    @classmethod
    def of(cls, ledger: CheckpointLedger) -> "Lineage":
        """The lineage of a checkpoints folder. The model that it starts from has the number before its first version."""
        trained = {
            version: entry.parent
            for entry in ledger.entries
            if entry.event == "trained" and entry.dataset and (version := version_in(entry.checkpoint)) is not None
        }
        start = min(trained, default=0) - 1
        parents = {version: version_in(parent) for version, parent in trained.items()}
        return cls({version: start if parent is None else parent for version, parent in parents.items()})

    def path(self, version: int, other: int) -> list[int] | None:
        """The versions whose updates lie between two: those since their last common ancestor, on both sides.

        None if it is unknown how they are related.
        """
        if version == other:
            return []
        if not {version, other} <= self._known:
            return None
        ours, theirs = self._ancestors(version), self._ancestors(other)
        return sorted({*ours} ^ {*theirs}) if ours[-1] == theirs[-1] else None

    def distance(self, version: int, other: int) -> int:
        """Number of updates between two versions; if it is unknown how they are related, the difference of their numbers."""
        path = self.path(version, other)
        return abs(version - other) if path is None else len(path)

    def _ancestors(self, version: int) -> list[int]:
        """The version itself, its parent and so on, to the model that training started from."""
        ancestors = [version]
        while ancestors[-1] in self._parents:
            ancestors.append(self._parents[ancestors[-1]])
        return ancestors
