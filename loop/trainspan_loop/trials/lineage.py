"""Versions among the checkpoints of a run: the one that a dataset made, those before it, and the return to one of them."""

from collections.abc import Iterator
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, read_latest
from trainspan_training.checkpoints.folder import complete_checkpoints
from trainspan_training.checkpoints.ledger import CheckpointLedger

__all__ = ["ancestors", "is_in_service", "is_withdrawn", "version_trained_on"]


def version_trained_on(root: Path, dataset_sha256: str) -> CheckpointMeta | None:
    """The checkpoint that a dataset made; None if nothing came of it."""
    checkpoints = (CheckpointMeta.read(folder) for folder in reversed(complete_checkpoints(root)))
    return next((meta for meta in checkpoints if meta.dataset_sha256 == dataset_sha256), None)


def ancestors(root: Path, meta: CheckpointMeta) -> Iterator[CheckpointMeta]:
    """Its parent, the parent's parent and so on, as long as their checkpoints are kept."""
    folders = {folder.name: folder for folder in complete_checkpoints(root)}
    while meta.parent in folders:
        meta = CheckpointMeta.read(folders[meta.parent])
        yield meta


def is_withdrawn(root: Path, name: str) -> bool:
    """Whether an earlier checkpoint was put in service instead of this one."""
    return CheckpointLedger(root).is_withdrawn(name)


def is_in_service(root: Path, name: str) -> bool:
    """Whether training continues from this checkpoint and a restarted server serves it."""
    latest = read_latest(root)
    return latest is not None and latest.name == name
