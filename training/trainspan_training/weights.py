"""Weights and optimizer state to and from safetensors files; never pickle."""

import hashlib
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .model import load_model
from .policy import Policy

__all__ = ["FullWeights", "copy_companions", "hash_weights", "load_optimizer", "save_optimizer"]

_OURS = {"trainspan.json", "canary.json"}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


class FullWeights:
    """All weights of a model are trained and saved."""

    kind: Literal["full", "lora"] = "full"

    def __init__(self, model: Any) -> None:
        self._model = model

    def save(self, folder: Path, parent: Policy) -> None:
        """Weights as transformers names them (tied ones once), config and tokenizer, as a model folder."""
        self._model.save_pretrained(folder)
        copy_companions(parent.folder, folder)

    @torch.no_grad()
    def restore(self, policy: Policy) -> None:
        """Puts the policy's weights back into the live model, in place."""
        saved = dict(load_model(policy.folder).named_parameters())
        for name, parameter in self._model.named_parameters():
            parameter.copy_(saved[name])


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


def save_optimizer(optimizer: Any, model: Any, path: Path) -> None:
    """Every tensor of the optimizer's state as `{parameter}/{key}`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{names[id(parameter)]}/{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    save_file(tensors, path)


def load_optimizer(optimizer: Any, model: Any, path: Path | None) -> None:
    """The optimizer's state from a file; without one, or where it does not exist, an empty state."""
    parameters = dict(model.named_parameters())
    indexes = {
        id(parameter): index
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, torch.Tensor]] = {}
    if path is not None and path.exists():
        with safe_open(path, framework="pt") as file:
            for item in file.keys():  # noqa: SIM118  # it is no mapping
                name, _, key = item.rpartition("/")
                if name in parameters:
                    state.setdefault(indexes[id(parameters[name])], {})[key] = file.get_tensor(item)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
