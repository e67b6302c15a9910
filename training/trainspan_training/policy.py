"""The newest good weights: where a round starts from."""

from dataclasses import dataclass
from pathlib import Path

from trainspan_schemas.checkpoint import META_FILE, CheckpointMeta
from trainspan_schemas.errors import CheckpointError

from .checkpoints import Checkpoints
from .model import check_folder, find_model

__all__ = ["Policy", "starting_policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights on disk."""

    folder: Path
    checkpoint: str | None
    """Name in the checkpoints folder, None for a model from elsewhere."""
    base: str
    """Model that version 0 was."""
    version: int

    @property
    def name(self) -> str:
        """What `trainspan.json` calls it as a parent: the checkpoint's name, or the model's path."""
        return self.checkpoint or str(self.folder)


def starting_policy(checkpoints: Checkpoints, model: str | None) -> Policy:
    """`latest`, or `model` where nothing was published yet. Raises CheckpointError where there is neither."""
    latest = checkpoints.latest()
    if latest:
        meta = CheckpointMeta.read(latest)
        return Policy(check_folder(latest), latest.name, meta.base, meta.version)
    if not model:
        raise CheckpointError(
            f"no checkpoint in {checkpoints.root} and no model: give --model, or start `trainspan serve MODEL_DIR`"
        )
    folder = find_model(model)
    version = CheckpointMeta.read(folder).version if (folder / META_FILE).exists() else 0
    folder = folder.resolve()
    return Policy(folder, None, str(folder) if Path(model).is_dir() else model, version)
