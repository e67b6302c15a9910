"""Full weights with a LoRA adapter added: W + s·B·A for each matrix that has an adapter (Hu et al. 2021, eq. 3).

s is alpha / r, or alpha / √r with rank-stabilized adapters (peft's `use_rslora`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspan_schemas.errors import CheckpointError
from trainspan_serving.checkpoints.adapters import CONFIG_FILE, TENSORS_FILE, split_name
from trainspan_serving.checkpoints.weights import Weights, read_json, weight_files

__all__ = ["MergedWeights", "check_can_merge"]

_VARIED = ("alpha_pattern", "rank_pattern")


def check_can_merge(adapter: Path, served: Weights) -> None:
    """Raises CheckpointError if the weights are quantized, or if layers differ in rank or scale or have transposed matrices."""
    config = read_json(adapter / CONFIG_FILE)
    reasons = [f"an adapter with {name}" for name in (*_VARIED, "fan_in_fan_out") if config.get(name)]
    if served.config.get("quantization_config"):
        reasons.append("an adapter on quantized weights")
    if reasons:
        raise CheckpointError(
            f"{adapter.name}: {reasons[0]} cannot be merged: start the server with [advanced] serving.merge_adapters = false"
        )


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """The tensors of the full weights in `folder`, with those of `adapter` added, if there is one."""

    folder: Path
    adapter: Path | None = None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields names and slices of safetensors files; a merged matrix is computed in float32 when it is reached.

        A slice has `get_shape()` and is read by indexing it.
        """
        import torch
        from safetensors import safe_open

        updates = _Updates(self.adapter) if self.adapter else None
        for path in weight_files(self.folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    update = updates.of(name) if updates else None
                    if update is None:
                        yield name, file.get_slice(name)
                    else:
                        yield name, _Matrix(file.get_tensor(name).to(torch.float32).add_(update))

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields names and whole tensors: merged ones in float32, the others in the dtype of the file."""
        for name, saved in self:
            yield name, saved[:]


class _Updates:
    """The products s·B·A of an adapter's file."""

    def __init__(self, adapter: Path) -> None:
        from safetensors.torch import load_file

        config = read_json(adapter / CONFIG_FILE)
        rank = config["r"]
        self._scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        self._pairs: dict[str, dict[str, Any]] = {}
        for name, tensor in load_file(adapter / TENSORS_FILE).items():
            module, side = split_name(name)
            self._pairs.setdefault(f"{module}.weight", {})[side] = tensor

    def of(self, name: str) -> Any:
        """The update of a matrix of the full weights, in float32; None if it has none."""
        if name not in self._pairs:
            return None
        a, b = (self._pairs[name][side].float() for side in "AB")
        return (b @ a).mul_(self._scale)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A tensor that is read like a slice of a safetensors file."""

    tensor: Any

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, place: Any) -> Any:
        return self.tensor[place]
