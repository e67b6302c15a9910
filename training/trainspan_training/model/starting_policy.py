"""The newest good weights, from which a round starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainspan_schemas.artifacts.checkpoint import META_FILE, CheckpointMeta, base_digest
from trainspan_schemas.errors import CheckpointError
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.model.loading import check_folder, find_model

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "Policy", "named_policy", "starting_policy"]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights on disk."""

    folder: Path
    checkpoint: str | None
    """Name in the checkpoints folder; None for a model from elsewhere."""
    base: str
    """The model that the run started from: path or Hugging Face id."""
    version: int
    model: Path
    """Folder of the model: `folder` or, for an adapter, that of `base`."""
    trained_on: str | None = None
    """Name of the policy whose calls it was trained on; None before training, or if the datasets do not name one."""
    base_digest: str | None = None
    """Digest of the model that training began with; None if the checkpoint does not record it."""
    adam_rounds: int = 0
    """Number of updates in its Adam's state; 0 if it has none."""

    @property
    def name(self) -> str:
        """Its name as a parent in `trainspan.json`: the checkpoint's name, or the model's path."""
        return self.checkpoint or str(self.folder)


def starting_policy(checkpoints: Checkpoints, model: str | None, adapter: str = "none") -> Policy:
    """`latest`, or `model` if there is no checkpoint yet.

    Raises CheckpointError if there is neither, or if `latest` is not of the kind that `adapter` trains.
    """
    kind: Literal["full", "lora"] = "lora" if adapter == "lora" else "full"
    latest = checkpoints.latest()
    if latest:
        meta = CheckpointMeta.read(latest)
        if meta.kind != kind:
            raise CheckpointError(
                f"{latest} is of kind {meta.kind}, but model.adapter = {adapter!r} trains {kind}: choose another --checkpoints"
            )
        folder = check_folder(latest) if kind == "full" else _base_of(latest, meta)
        return _policy_of(checkpoints, latest, meta, folder)
    if not model:
        raise CheckpointError(
            f"no checkpoint in {checkpoints.root} and no model: set --model, or start `trainspan serve MODEL_DIR`"
        )
    folder = find_model(model)
    version = _version_of(folder)
    folder = folder.resolve()
    base = str(folder) if Path(model).is_dir() else model
    return Policy(folder, None, base, version, folder, base_digest=base_digest(folder))


def named_policy(checkpoints: Checkpoints, meta: CheckpointMeta) -> Policy:
    """The parent named by a checkpoint. Raises CheckpointError if it is gone."""
    parent = meta.parent or ""
    folder = checkpoints.root / parent
    if parent == folder.name and folder.is_dir():
        parent_meta = CheckpointMeta.read(folder)
        return _policy_of(checkpoints, folder, parent_meta, folder if meta.kind == "full" else _base_of(folder, meta))
    folder = find_model(parent)
    return Policy(folder, None, meta.base, _version_of(folder), folder, base_digest=meta.base_digest)


def _policy_of(checkpoints: Checkpoints, folder: Path, meta: CheckpointMeta, model: Path) -> Policy:
    """A checkpoint as a policy."""
    done = meta.adam_rounds if checkpoints.state_files(folder.name) else 0
    return Policy(folder, folder.name, meta.base, meta.version, model, meta.policy, meta.base_digest, done)


def _version_of(folder: Path) -> int:
    """The version of a model from elsewhere: 0, or that in its `trainspan.json`."""
    return CheckpointMeta.read(folder).version if (folder / META_FILE).exists() else 0


def _base_of(adapter: Path, meta: CheckpointMeta) -> Path:
    """The model folder under a LoRA checkpoint."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            raise CheckpointError(f"{adapter} has no {name}: it is not a complete LoRA checkpoint")
    return find_model(meta.base)
