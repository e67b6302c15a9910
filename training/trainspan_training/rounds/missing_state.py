"""Adam's state that a killed trainer did not write, rebuilt from its checkpoint's parent and dataset.

The same steps from the same weights and state give the same state: bit-identical on a CPU.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.artifacts.dataset import dataset_dirs
from trainspan_schemas.errors import CheckpointError, DatasetError
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.data.dataset import DatasetFolder, open_dataset
from trainspan_training.model.starting_policy import Policy, named_policy

if TYPE_CHECKING:
    from trainspan_training.data.layout import BatchLayout  # NumPy: a job without work imports none

__all__ = ["MissingState", "dataset_of", "find_missing_state"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MissingState:
    """The state of `policy`, obtained by training `parent` on `dataset`."""

    policy: Policy
    parent: Policy
    dataset: DatasetFolder
    micro_batch_tokens: int | None
    """Micro-batch size that its steps were planned with; None if its checkpoint does not record it."""
    tree_tokens: int | None
    """The same of the greatest tree of one rollout's rows."""

    def layout(self, layout: "BatchLayout") -> "BatchLayout":
        """The layout with the round's micro-batch size: another, fitted to current memory, would round differently."""
        tokens = self.micro_batch_tokens or layout.tokens
        tree = self.tree_tokens or tokens
        if max(tokens, tree) <= layout.longest:
            return replace(layout, tokens=tokens, tree=tree)
        log.warning(
            "memory has no room for the %d tokens at a time of %s: repeating its steps with %d, equal except for rounding",
            *(max(tokens, tree), self.policy.name, layout.tree),
        )
        return layout


def find_missing_state(checkpoints: Checkpoints, policy: Policy, datasets: Path) -> MissingState | None:
    """The newest policy's missing state; None if it is there, or (with a warning) if its inputs are gone."""
    if policy.checkpoint is None or not checkpoints.lacks_state(policy.checkpoint):
        return None
    meta = CheckpointMeta.read(policy.folder)
    try:
        parent = named_policy(checkpoints, meta)
    except CheckpointError as error:
        log.warning("the optimizer state of %s cannot be recomputed: %s", policy.name, error)
        return None
    dataset = dataset_of(meta, datasets)
    if dataset is None:
        log.warning("the optimizer state of %s cannot be recomputed: its dataset is not in %s", policy.name, datasets)
        return None
    if parent.checkpoint and checkpoints.lacks_state(parent.checkpoint):
        log.warning("the optimizer state of %s cannot be recomputed: its parent %s has none", policy.name, parent.name)
        return None
    return MissingState(policy, parent, dataset, meta.micro_batch_tokens, meta.tree_tokens)


def dataset_of(meta: CheckpointMeta, datasets: Path) -> DatasetFolder | None:
    """The dataset that a checkpoint was trained on: at the path, in it, or next to it; None if it is gone."""
    for folder in [datasets, *reversed(dataset_dirs(datasets)), *reversed(dataset_dirs(datasets.parent))]:
        try:
            dataset = open_dataset(folder)
        except DatasetError:
            continue
        if dataset.sha256 == meta.dataset_sha256:
            return dataset
    return None
