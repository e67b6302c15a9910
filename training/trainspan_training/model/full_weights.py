"""Weights to and from safetensors files; never pickle. Several processes write a file each, at the same time."""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from trainspan_schemas.checkpoint import join_hashes
from trainspan_training.checkpoints.tensor_files import INDEX, TensorFile, TensorParts
from trainspan_training.devices.sharding import local, part_of, settled, stored, whole
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
        """This process's files of the weights as transformers names them, tied ones once; every process takes part.

        What transformers puts together when it loads (experts of a mixture, say) is taken apart again by the leader alone.
        """
        tensors = self.tensors()
        shapes = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
        if revert_weight_conversion(self._model, dict(shapes)).keys() == shapes.keys():
            return write_tensors(folder, "model", tensors, team)
        complete = {}
        for name, tensor in tensors.items():  # one at a time on the device, and kept by the leader alone
            one = whole(tensor.detach())
            if team.leads:
                complete[name] = one.cpu()
        alone = Team()
        return (
            write_tensors(folder, "model", revert_weight_conversion(self._model, complete), alone) if team.leads else {}
        )

    def complete(self, folder: Path, parent: Policy, written: Written) -> None:
        """What stands beside the weights of a model folder: the index of several files, config, tokenizer."""
        if len(written) > 1:
            index = {name: file for file, (_, names) in written.items() for name in names}
            size = sum((folder / file).stat().st_size for file in written)
            (folder / INDEX).write_text(
                json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}, indent=2)
                + "\n"
            )
        copy_companions(parent.folder, folder)

    def restore(self, policy: Policy) -> bool:
        """Puts the policy's weights back into the live model, in place; whether they are the ones that it had."""
        live = self.tensors()
        with TensorParts.of_model(policy.folder) as parts:
            if all(name in parts for name in live):
                return restore(live, lambda name, tensor: stored(tensor, parts, name))
        loaded = load_model(policy.folder).state_dict()  # its names are others than those of the files
        return restore(live, lambda name, tensor: part_of(loaded[name], tensor))

    def tensors(self) -> dict[str, Tensor]:
        """The live weights, tied ones once."""
        return names_of(self._model)


def names_of(model: Any) -> dict[str, Tensor]:
    """The live tensors of a model under the names that its files have, without those of an adapter in it, tied ones once."""
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    tied = getattr(owner, "all_tied_weights_keys", None) or {}
    named = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in settled(model).state_dict(keep_vars=True).items()
        if ".lora_" not in name
    }
    return {name: tensor for name, tensor in named.items() if named.get(tied.get(name, "")) is not tensor}


def has_slices(model: Any, folder: Path) -> bool:
    """Whether the files of a folder hold every tensor of a model under its name, so that parts of them can be read."""
    with TensorParts.of_model(folder) as parts:
        return all(name in parts for name in names_of(model))


def load_slices(model: Any, folder: Path) -> None:
    """Reads this process's part of every tensor of a model from the files of a folder; an adapter in it stays as it is."""
    with TensorParts.of_model(folder) as parts:
        restore(names_of(model), lambda name, tensor: stored(tensor, parts, name))


def write_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor], team: Team) -> Written:
    """Writes whole tensors, each by one process, about equal bytes by each; this process's file. Raises OSError.

    A tensor that is split is put together, one at a time, by all processes.
    """
    writers, count = _assign(tensors, team.size)
    mine = {name: one for name, one in tensors.items() if writers[name] == team.rank}
    name = f"{stem}.safetensors" if count == 1 else f"{stem}-{team.rank + 1:05d}-of-{count:05d}.safetensors"
    file: TensorFile | None = None
    failure: OSError | None = None
    try:
        if mine:
            file = TensorFile(folder / name, {key: (one.dtype, tuple(one.shape)) for key, one in mine.items()})
    except OSError as error:
        failure = error
    for key, tensor in tensors.items():
        complete = whole(tensor.detach())  # with the others, whatever became of this process's file
        if file is not None and failure is None and key in mine:
            try:
                file.write(key, complete)
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    return {} if file is None else {name: (file.close(), list(mine))}


def _assign(tensors: Mapping[str, Tensor], size: int) -> tuple[dict[str, int], int]:
    """Which process writes each tensor, and how many write."""
    load = [0] * size
    writers = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].numel()):
        writers[name] = rank = load.index(min(load))
        load[rank] += tensor.numel() * tensor.element_size()
    return writers, sum(bytes_ > 0 for bytes_ in load)


@torch.no_grad()
def restore(live: Mapping[str, Tensor], saved: Callable[[str, Tensor], Tensor]) -> bool:
    """Puts what `saved` gives for each live tensor (or this process's part of it) into it; whether all were the same."""
    same = True
    for name, tensor in live.items():
        target, value = local(tensor), saved(name, tensor)
        same = same and torch.equal(target, value)
        target.copy_(value)
    return same


def hash_of(written: Written) -> str:
    """`weights_sha256` of files whose hashes were taken as they were written."""
    return join_hashes([sha256 for _, (sha256, _) in sorted(written.items())])


def copy_companions(source: Path, folder: Path, without: Collection[str] = ()) -> None:
    """Config, tokenizer, chat template and whatever else stands beside the weights, as the source has them."""
    for path in source.iterdir():
        other = path.name.startswith(".") or path.name.endswith(_WEIGHTS) or path.name in _OURS
        if path.is_file() and not other and path.name not in without:
            shutil.copyfile(path, folder / path.name)
