"""A policy in service: a version, the full weights in the engine, and the LoRA adapter on or in them, if any."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["Adapter", "ServedPolicy"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that the engine has loaded."""

    folder: Path
    request: Any
    """vLLM's `LoRARequest`: passed with a generation, it selects the adapter."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """Weights that answer calls."""

    name: str
    """The policy's name, under which its calls are recorded."""
    version: int
    weights: Path
    """Folder of the full weights."""
    adapter: Adapter | None = None
    merged: Path | None = None
    """Folder of the adapter that the engine's full weights contain."""
    base: str | None = None
    """Digest of the model that training began with; None if the weights do not say."""
    weights_sha256: str | None = None
    """Hash of the checkpoint's files, as in its `trainspan.json`; None for a model that is no checkpoint."""

    @property
    def folder(self) -> Path:
        """The checkpoint: the adapter's folder, otherwise that of the full weights."""
        return self.adapter_folder or self.weights

    @property
    def adapter_folder(self) -> Path | None:
        """The adapter's folder, whether it is merged or not."""
        return self.adapter.folder if self.adapter else self.merged

    @property
    def kind(self) -> Literal["full", "lora"]:
        return "lora" if self.adapter_folder else "full"
