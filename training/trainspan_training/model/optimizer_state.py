"""Adam's state on disk: each process writes its own part in the background, and reads the parts it needs.

Nothing may change the state while it is being written: call `StateWriter.wait` before the next step.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainspan_schemas.errors import CheckpointError
from trainspan_training.checkpoints.tensor_files import Layout, TensorFile, TensorParts
from trainspan_training.devices.sharding import local, resharded, rows_of, stored

__all__ = ["StateWriter", "load_optimizer"]

log = logging.getLogger(__name__)

_STEP = "step"


class StateWriter:
    """Writes an optimizer's current state, as `{parameter}/{key}`: one file for each process `rank` of `size`.

    Reserves the disk space up front: raises OSError if there is too little. A file gets its final name when it is
    complete.
    """

    def __init__(self, optimizer: Any, model: Any, folder: Path, rank: int, size: int) -> None:
        self._tensors = _own_state(optimizer, model, rank, size)
        self._path = folder / f"part-{rank + 1:05d}-of-{size:05d}.safetensors"
        layout: Layout = {
            name: (local(value).dtype, tuple(local(value).shape)) for name, value in self._tensors.items()
        }
        rows = {
            name: (bounds[0], tensor.shape[0])
            for name, tensor in self._tensors.items()
            if (bounds := rows_of(tensor)) is not None
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._file = TensorFile(self._path.with_name(f".tmp-{self._path.name}"), layout, rows)
        self._thread: threading.Thread | None = None

    def start(self, before: Callable[[], None] = lambda: None) -> None:
        """Starts writing in a thread, after `before`, which does not fail."""
        self._thread = threading.Thread(target=self._write, args=[before], name="adam", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing reads the state any longer."""
        if self._thread is not None:
            self._thread.join()

    def discard(self) -> None:
        """Deletes the reserved file; only before `start`."""
        self._file.discard()

    def _write(self, before: Callable[[], None]) -> None:
        before()
        try:
            for name, tensor in self._tensors.items():
                self._file.write(name, local(tensor))
            self._file.close()
            self._file.path.replace(self._path)
        except OSError as error:
            self._file.discard()
            log.warning("cannot write Adam's state %s: %s; a restarted trainer recomputes it", self._path, error)
        finally:
            self._tensors = {}


def _own_state(optimizer: Any, model: Any, rank: int, size: int) -> dict[str, Tensor]:
    """The tensors for this process to write: its rows of split tensors, and every `size`-th of the replicated ones."""
    names = {id(parameter): name for name, parameter in resharded(model).named_parameters()}
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
    """Loads the optimizer's state from the files of any number of processes; without files, the state is empty.

    Raises CheckpointError if they hold the state of another model. Logs a warning for parameters without state (those
    that no token went through have none).
    """
    parameters = {name: parameter for name, parameter in resharded(model).named_parameters() if parameter.requires_grad}
    indexes = {
        id(parameter): index
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Tensor]] = {}
    with TensorParts(files) as parts:
        names = {item: item.rpartition("/")[0] for item in parts}
        if unknown := sorted(set(names.values()) - parameters.keys()):
            raise CheckpointError(
                f"{files[0].parent} has Adam's state of {len(unknown)} tensors that are not trained, first {unknown[0]!r}: "
                "it is from another model or version; delete the folder to let Adam start from zero"
            )
        for item, name in names.items():
            parameter, key = parameters[name], item.removeprefix(f"{name}/")
            if key == _STEP:
                value = parts.whole(item)
            else:
                value = torch.empty_like(parameter, requires_grad=False)
                local(value).copy_(stored(parameter, parts, item))
            state.setdefault(indexes[id(parameter)], {})[key] = value
    if files and (
        fresh := sorted(name for name, parameter in parameters.items() if indexes.get(id(parameter), -1) not in state)
    ):
        log.warning(
            "Adam starts from zero for %d of %d tensors, which have no state in %s, first %s",
            *(len(fresh), len(parameters), files[0].parent, fresh[0]),
        )
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
