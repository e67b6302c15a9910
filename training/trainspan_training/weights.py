"""Weights and optimizer state to and from safetensors files; never pickle."""

import hashlib
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from .model import load_model
from .policy import Policy
from .sharding import gathered, like, settled

__all__ = ["FullWeights", "copy_companions", "gather_optimizer", "hash_weights", "load_optimizer"]

_OURS = {"trainspan.json", "canary.json"}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


class FullWeights:
    """All weights of a model are trained and saved."""

    kind: Literal["full", "lora"] = "full"

    def __init__(self, model: Any) -> None:
        self._model = model

    def gather(self, *, keep: bool) -> dict[str, Tensor]:
        """All weights whole, in every process that is to `keep` them; see `sharding`."""
        return gathered(settled(self._model).state_dict(keep_vars=True), keep=keep)

    def save(self, folder: Path, parent: Policy, tensors: dict[str, Tensor]) -> None:
        """The gathered weights as transformers names them (tied ones once), config and tokenizer, as a model folder."""
        self._model.save_pretrained(folder, state_dict=tensors)
        copy_companions(parent.folder, folder)

    @torch.no_grad()
    def restore(self, policy: Policy) -> None:
        """Puts the policy's weights back into the live model, in place."""
        saved = dict(load_model(policy.folder).named_parameters())
        for name, parameter in settled(self._model).named_parameters():
            parameter.copy_(like(saved[name], parameter))


def copy_companions(source: Path, folder: Path, without: Collection[str] = ()) -> None:
    """Config, tokenizer, chat template and whatever else stands beside the weights, as the source has them."""
    for path in source.iterdir():
        other = path.name.startswith(".") or path.name.endswith(_WEIGHTS) or path.name in _OURS
        if path.is_file() and not other and path.name not in without:
            shutil.copyfile(path, folder / path.name)


def hash_weights(folder: Path) -> str:
    """sha256 over the bytes of the folder's safetensors files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def gather_optimizer(optimizer: Any, model: Any, *, keep: bool) -> dict[str, Tensor]:
    """Every tensor of the optimizer's state as `{parameter}/{key}`, whole, in every process that is to `keep` them."""
    names = {id(parameter): name for name, parameter in settled(model).named_parameters()}
    tensors = {
        f"{names[id(parameter)]}/{key}": torch.as_tensor(value)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return gathered(tensors, keep=keep)


def load_optimizer(optimizer: Any, model: Any, path: Path | None) -> None:
    """The optimizer's state from a file; without one, or where it does not exist, an empty state."""
    parameters = dict(settled(model).named_parameters())
    indexes = {
        id(parameter): index
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Tensor]] = {}
    if path is not None and path.exists():
        with safe_open(path, framework="pt") as file:
            for item in file.keys():  # noqa: SIM118  # it is no mapping
                name, _, key = item.rpartition("/")
                if name in parameters:
                    value = like(file.get_tensor(item), parameters[name]) if key != "step" else file.get_tensor(item)
                    state.setdefault(indexes[id(parameters[name])], {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
