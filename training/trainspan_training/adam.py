"""Adam's state on disk: written by every process for its own part, while the trainer goes on, and read in parts.

Nothing may change the state while it is written: `StateWriter.wait` before the next step.
"""

import logging
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .sharding import local, rows_of, settled, stored
from .tensor_files import Layout, TensorFile, TensorParts

__all__ = ["StateWriter", "load_optimizer"]

log = logging.getLogger(__name__)

_STEP = "step"


class StateWriter:
    """Writes the state that an optimizer has now, as `{parameter}/{key}`: in process `rank` of `size` a file of its own.

    The space on disk is taken at once: raises OSError where there is too little. A file has its name once it is whole.
    """

    def __init__(self, optimizer: Any, model: Any, folder: Path, rank: int, size: int) -> None:
        self._tensors = _own_state(optimizer, model, rank, size)
        self._path = folder / f"part-{rank + 1:05d}-of-{size:05d}.safetensors"
        layout: Layout = {name: (local(one).dtype, tuple(local(one).shape)) for name, one in self._tensors.items()}
        rows = {
            name: (own[0], tensor.shape[0])
            for name, tensor in self._tensors.items()
            if (own := rows_of(tensor)) is not None
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._file = TensorFile(self._path.with_name(f".tmp-{self._path.name}"), layout, rows)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Writes in a thread."""
        self._thread = threading.Thread(target=self._write, name="adam", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing reads the state any more."""
        if self._thread is not None:
            self._thread.join()

    def discard(self) -> None:
        """Deletes what was to be written; before `start`."""
        self._file.discard()

    def _write(self) -> None:
        try:
            for name, tensor in self._tensors.items():
                self._file.write(name, local(tensor))
            self._file.close()
            self._file.path.replace(self._path)
        except OSError as error:
            self._file.discard()
            log.warning("cannot write Adam's state %s: %s; a trainer started again makes it anew", self._path, error)
        finally:
            self._tensors = {}


def _own_state(optimizer: Any, model: Any, rank: int, size: int) -> dict[str, Tensor]:
    """What this process is to write: its rows of tensors that are split, and every `size`-th of those that all have."""
    names = {id(parameter): name for name, parameter in settled(model).named_parameters()}
    tensors = [
        (f"{names[id(parameter)]}/{key}", torch.as_tensor(value))
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    ]
    return {
        name: tensor
        for index, (name, tensor) in enumerate(tensors)
        if (local(tensor).numel() if isinstance(tensor, DTensor) else index % size == rank)
    }


def load_optimizer(optimizer: Any, model: Any, files: list[Path]) -> None:
    """The optimizer's state from the files of all parts, of however many processes; without files an empty state."""
    parameters = dict(settled(model).named_parameters())
    indexes = {
        id(parameter): index
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Tensor]] = {}
    with TensorParts(files) as parts:
        for item in parts:
            name, _, key = item.rpartition("/")
            if (parameter := parameters.get(name)) is None:
                continue
            if key == _STEP:
                value = parts.whole(item)
            else:
                value = torch.empty_like(parameter, requires_grad=False)
                local(value).copy_(stored(parameter, parts, item))
            state.setdefault(indexes[id(parameter)], {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
