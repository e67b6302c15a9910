"""Weights and optimizer state to and from safetensors files; never pickle."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .model import load_model

__all__ = ["copy_companions", "hash_weights", "load_optimizer", "restore_weights", "save_optimizer", "save_weights"]

_OURS = {"trainspan.json", "canary.json"}


def save_weights(model: Any, folder: Path) -> None:
    """Weights as transformers names them (tied ones once), in one or several safetensors files, with an index if several."""
    model.save_pretrained(folder)


def copy_companions(source: Path, folder: Path) -> None:
    """Config, tokenizer, chat template and whatever else stands beside the weights, as the parent has them."""
    for path in source.iterdir():
        weights = path.name.endswith(
            (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
        )
        if path.is_file() and not path.name.startswith(".") and not weights and path.name not in _OURS:
            shutil.copyfile(path, folder / path.name)


def hash_weights(folder: Path) -> str:
    """sha256 over the bytes of the folder's safetensors files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


@torch.no_grad()
def restore_weights(model: Any, folder: Path) -> None:
    """Puts the folder's weights back into the live model, in place."""
    saved = dict(load_model(folder).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.copy_(saved[name])


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
