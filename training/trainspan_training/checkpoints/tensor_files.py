"""safetensors files, written tensor by tensor, hashed at the same time if wanted, and read in parts.

A tensor split by rows (its first dimension) is stored in several files under one name; the metadata of each file say
which rows it holds. Format: https://huggingface.co/docs/safetensors/index#format
"""

import contextlib
import errno
import json
import os
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainspan_schemas.errors import CheckpointError

__all__ = ["INDEX", "SINGLE", "Layout", "TensorFile", "TensorParts"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Name of the index, which maps each tensor of a model to its file, if there are several."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_ROWS = "rows"

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor of a file, in file order."""


class TensorFile:
    """A new file for tensors of this layout. Reserves its disk space up front: raises OSError if there is too little.

    `rows`: for a split tensor, the first row in this file and the number of rows in all files. `digest` (of hashlib) is
    updated with the file's contents.
    """

    def __init__(
        self, path: Path, layout: Layout, rows: Mapping[str, tuple[int, int]] | None = None, *, digest: Any = None
    ) -> None:
        self.path = path
        self._digest = digest
        self._hashing = ThreadPoolExecutor(1, "hash")
        self._left = list(layout.items())
        metadata = {"format": "pt", **({_ROWS: json.dumps(rows)} if rows else {})}
        header: dict[str, object] = {"__metadata__": metadata}
        end = 0
        for name, (dtype, shape) in layout.items():
            begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        try:
            _allocate(self._file.fileno(), 8 + len(text) + end)
            self._put(struct.pack("<Q", len(text)) + text)
        except OSError:
            self.discard()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes the next tensor of the layout. Raises OSError."""
        expected, (dtype, shape) = self._left.pop(0)
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, dtype, shape), name
        self._put(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Flushes the file to disk. Raises OSError."""
        assert not self._left, "every tensor is written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._hashing.shutdown()

    def discard(self) -> None:
        """Deletes the file."""
        with contextlib.suppress(OSError):  # disk full: buffered data cannot be flushed, and need not be
            self._file.close()
        self._hashing.shutdown()
        self.path.unlink(missing_ok=True)

    def _put(self, content: bytes | memoryview) -> None:
        hashed = self._hashing.submit(self._digest.update, content) if self._digest else None
        try:
            self._file.write(content)
        finally:
            if hashed:
                hashed.result()


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of a tensor in one file."""

    first: int
    file: Any
    path: Path


class TensorParts:
    """The tensors of several files, read as one."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._open = ExitStack()
        self._parts: dict[str, list[_Part]] = {}
        for path in sorted(files):
            file: Any = self._open.enter_context(safe_open(path, framework="pt"))
            rows = json.loads((file.metadata() or {}).get(_ROWS, "{}"))
            for name in file.keys():  # noqa: SIM118  # not a mapping
                first, _ = rows.get(name, (0, 0))
                self._parts.setdefault(name, []).append(_Part(first, file, path))
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.first)

    @classmethod
    def of_model(cls, folder: Path) -> "TensorParts":
        """The tensors that transformers and vLLM read: from the files in the index, else from `model.safetensors`.

        Other files in the folder hold something else, or an older state. Raises CheckpointError if the index is
        damaged, names missing files or tensors, or is next to a `model.safetensors` that it does not name.
        """
        single = folder / SINGLE
        if not (index := folder / INDEX).is_file():
            return cls([single] if single.is_file() else folder.glob("*.safetensors"))
        try:
            home = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged ({error!r}): copy the model again") from error
        files = sorted(set(home.values()))
        if single.is_file() and SINGLE not in files:
            raise CheckpointError(
                f"{folder} has both {SINGLE} and an index of other files, and programs differ in which they read: delete one"
            )
        for file in files:
            if not (folder / file).is_file():
                raise CheckpointError(f"{index} names {file}, which does not exist: copy the model again")
        parts = cls(folder / file for file in files)
        parts._keep(home, index)
        return parts

    def _keep(self, home: Mapping[str, str], index: Path) -> None:
        """Keeps only the tensors in the index, each from the file named there."""
        for name, file in home.items():
            if not any(part.path == index.parent / file for part in self._parts.get(name, ())):
                raise CheckpointError(
                    f"{index} expects {name!r} in {file}, which does not have it: copy the model again"
                )
        self._parts = {
            name: [part for part in self._parts[name] if part.path == index.parent / file]
            for name, file in home.items()
        }

    def __enter__(self) -> "TensorParts":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __iter__(self) -> Any:
        return iter(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def whole(self, name: str) -> Tensor:
        """The whole tensor, concatenated from its parts."""
        parts: list[Tensor] = [part.file.get_tensor(name) for part in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to `last` (exclusive); reads no others."""
        slices: list[Tensor] = []
        for part in self._parts[name]:
            stored = part.file.get_slice(name)
            begin, end = max(first - part.first, 0), min(last - part.first, stored.get_shape()[0])
            if begin < end or first == last:
                slices.append(stored[begin : max(begin, end)])
        return slices[0] if len(slices) == 1 or first == last else torch.cat(slices)


def _allocate(descriptor: int, size: int) -> None:
    """Reserves the disk space, if the file system supports it."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            raise
