"""Writes and reads weights as safetensors; never pickle. Several processes write one file each, concurrently."""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from trainspan_schemas.artifacts.checkpoint import join_hashes
from trainspan_training.checkpoints.tensor_files import INDEX, TensorFile, TensorParts
from trainspan_training.devices.sharding import local, part_of, resharded, stored, whole
from trainspan_training.devices.team import Team
from trainspan_training.model.loading import load_model
from trainspan_training.model.starting_policy import Policy

__all__ = [
    "FullWeights",
    "Written",
    "copy_companions",
    "has_slices",
    "hash_of",
    "load_slices",
    "restore",
    "write_tensors",
]

_OURS = {"trainspan.json", "canary.json"}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")

Written = Mapping[str, tuple[str, Collection[str]]]
"""File → its sha256, and the names of its tensors."""


class FullWeights:
    """All weights of a model are trained and saved."""

    kind: Literal["full", "lora"] = "full"

    def __init__(self, model: Any) -> None:
        self._model = model

    def write(self, folder: Path, team: Team) -> Written:
        """Writes this process's weight files, named as in transformers, tied tensors once; every process takes part.

        Tensors that transformers merges when loading (experts of a mixture, say) are split again by the leader alone.
        """
        tensors = self.tensors()
        shapes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()
        }
        if revert_weight_conversion(self._model, dict(shapes)).keys() == shapes.keys():
            return write_tensors(folder, "model", tensors, team)
        complete = {}
        for name, tensor in tensors.items():  # one at a time on the device, and kept only by the leader
            gathered = whole(tensor.detach())
            if team.leads:
                complete[name] = gathered.cpu()
        alone = Team()
        return (
            write_tensors(folder, "model", revert_weight_conversion(self._model, complete), alone) if team.leads else {}
        )

    def complete(self, folder: Path, parent: Policy, written: Written) -> None:
        """Writes the other files of a model folder: the index if there are several files, config, tokenizer."""
        if len(written) > 1:
            index = {name: file for file, (_, names) in written.items() for name in names}
            size = sum((folder / file).stat().st_size for file in written)
            (folder / INDEX).write_text(
                json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}, indent=2)
                + "\n"
            )
        copy_companions(parent.folder, folder)

    def restore(self, policy: Policy) -> bool:
        """Restores the policy's weights into the live model, in place; returns whether they were already the same."""
        live = self.tensors()
        with TensorParts.of_model(policy.folder) as parts:
            if all(name in parts for name in live):
                return restore(live, lambda name, tensor: stored(tensor, parts, name))
        loaded = load_model(policy.folder).state_dict()  # its names differ from those in the files
        return restore(live, lambda name, tensor: part_of(loaded[name], tensor))

    def tensors(self) -> dict[str, Tensor]:
        """The live weights, tied ones once."""
        return names_of(self._model)


def names_of(model: Any) -> dict[str, Tensor]:
    """The live tensors of a model, named as in its files, without those of its adapter, tied ones once."""
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    tied = getattr(owner, "all_tied_weights_keys", None) or {}
    tensors = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in resharded(model).state_dict(keep_vars=True).items()
        if ".lora_" not in name
    }
    return {name: tensor for name, tensor in tensors.items() if tensors.get(tied.get(name, "")) is not tensor}


def has_slices(model: Any, folder: Path) -> bool:
    """Whether a folder's files hold every tensor of the model under its name, so that parts of them can be read."""
    with TensorParts.of_model(folder) as parts:
        return all(name in parts for name in names_of(model))


def load_slices(model: Any, folder: Path) -> None:
    """Reads this process's part of every tensor of a model from a folder's files; leaves its adapter unchanged."""
    with TensorParts.of_model(folder) as parts:
        restore(names_of(model), lambda name, tensor: stored(tensor, parts, name))


def write_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor], team: Team) -> Written:
    """Writes whole tensors, about equally many bytes in each process; returns this process's file. Raises OSError.

    Split tensors are gathered, one at a time, by all processes.
    """
    writers, count = _assign(tensors, team.size)
    mine = {name: tensor for name, tensor in tensors.items() if writers[name] == team.rank}
    name = f"{stem}.safetensors" if count == 1 else f"{stem}-{team.rank + 1:05d}-of-{count:05d}.safetensors"
    file: TensorFile | None = None
    digest = hashlib.sha256()
    failure: OSError | None = None
    try:
        if mine:
            layout = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in mine.items()}
            file = TensorFile(folder / name, layout, digest=digest)
    except OSError as error:
        failure = error
    for key, tensor in tensors.items():
        complete = whole(tensor.detach())  # a collective operation, even if this process's file failed
        if file is not None and failure is None and key in mine:
            try:
                file.write(key, complete)
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    if file is None:
        return {}
    file.close()
    return {name: (digest.hexdigest(), list(mine))}


def _assign(tensors: Mapping[str, Tensor], size: int) -> tuple[dict[str, int], int]:
    """Assigns each tensor to the process that writes it; also returns the number of writers."""
    load = [0] * size
    writers = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].numel()):
        writers[name] = rank = load.index(min(load))
        load[rank] += tensor.numel() * tensor.element_size()
    return writers, sum(bytes_ > 0 for bytes_ in load)


@torch.no_grad()
def restore(live: Mapping[str, Tensor], saved: Callable[[str, Tensor], Tensor]) -> bool:
    """Copies `saved`'s value into each live tensor (or this process's part); returns whether all were equal before."""
    same = True
    for name, tensor in live.items():
        target, value = local(tensor), saved(name, tensor)
        same = same and torch.equal(target, value)
        target.copy_(value)
    return same


def hash_of(written: Written) -> str:
    """`weights_sha256` of files, from the hashes computed while writing."""
    return join_hashes([sha256 for _, (sha256, _) in sorted(written.items())])


def copy_companions(source: Path, folder: Path, without: Collection[str] = ()) -> None:
    """Copies config, tokenizer, chat template and all other files next to the weights from the source."""
    for path in source.iterdir():
        other = path.name.startswith(".") or path.name.endswith(_WEIGHTS) or path.name in _OURS
        if path.is_file() and not other and path.name not in without:
            shutil.copyfile(path, folder / path.name)
