"""Folders of files that tasks write and read while a dataset is made: on this machine, shared by nodes, or under a URL."""

import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainspan_schemas.errors import DatasetError
from trainspan_schemas.files.locks import open_locked
from trainspan_schemas.files.objects import Objects

__all__ = ["Files", "LocalFiles", "RemoteFiles", "lock_folder"]

_LOCK = "lock"
"""The file in a folder that is locked as long as the folder is in use."""
_ON_NODE = "trainspan-dataset-"
"""How the names of folders in the node's folder of temporary files begin."""
_LOCKED_AFTER_S = 60.0
"""A folder of this age is locked or abandoned."""


class Files(Protocol):
    """Named files. It can be pickled."""

    def filling(self, name: str) -> AbstractContextManager[Path]:
        """A local file to write; the file `name` exists once the block is left without an error."""
        ...

    def reading(self, name: str) -> AbstractContextManager[Path]:
        """The file as a local one, for the block. Raises DatasetError if it is not there."""
        ...

    def temporary_folder(self) -> AbstractContextManager[Path]:
        """An empty local folder, for the block."""
        ...


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """A folder on this machine, or that all nodes share under the same path."""

    folder: Path
    unfinished: Path | None = None
    """Folder of files that are being written; default: the same."""

    @contextmanager
    def filling(self, name: str) -> Iterator[Path]:
        """See Files. Writing a file twice, even at once, leaves one complete file."""
        temporary = (self.unfinished or self.folder) / f".{name}.{uuid.uuid4().hex}"
        if not self.folder.is_dir():
            raise self._not_shared()
        try:
            yield temporary
            temporary.replace(self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """See Files."""
        path = self.folder / name
        if not path.is_file():
            raise self._not_shared()
        yield path

    def temporary_folder(self) -> AbstractContextManager[Path]:
        """See Files. It is in the same folder, which has room for a dataset and is removed with all that killed tasks left."""
        return _temporary_folder(self.unfinished or self.folder)

    def _not_shared(self) -> DatasetError:
        """The error of a node that lacks files of the dataset."""
        return DatasetError(
            f"{self.folder} or its files are not on node {socket.gethostname()}: with engine = 'ray', --out must be a URL, "
            "or a folder that all nodes share under the same path"
        )


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """The objects under a URL; each is a local file while it is written or read."""

    objects: Objects
    local: Path | None = None
    """Folder of these local files; default: the node's folder of temporary files (TMPDIR)."""

    @contextmanager
    def filling(self, name: str) -> Iterator[Path]:
        """See Files."""
        with self._temporary(name) as path:
            yield path
            self.objects.upload(name, path)

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """See Files."""
        with self._temporary(name) as path:
            self.objects.download(name, path)
            yield path

    def temporary_folder(self) -> AbstractContextManager[Path]:
        """See Files. In the node's folder of temporary files, what killed tasks have left is removed first."""
        return _folder_on_node() if self.local is None else _temporary_folder(self.local)

    @contextmanager
    def _temporary(self, name: str) -> Iterator[Path]:
        with self.temporary_folder() as folder:
            yield folder / name


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trainspan-", dir=parent) as folder:
        yield Path(folder)


@contextmanager
def _folder_on_node() -> Iterator[Path]:
    for other in Path(tempfile.gettempdir()).glob(f"{_ON_NODE}*"):
        _remove_if_abandoned(other)
    with tempfile.TemporaryDirectory(prefix=_ON_NODE) as name:
        folder = Path(name)
        lock = lock_folder(folder)
        try:
            (folder / "files").mkdir()
            yield folder / "files"
        finally:
            if lock is not None:
                os.close(lock)


def _remove_if_abandoned(folder: Path) -> None:
    try:
        age_s = time.time() - folder.stat().st_mtime
    except OSError:  # another task has removed it
        return
    if age_s > _LOCKED_AFTER_S and (lock := lock_folder(folder)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def lock_folder(folder: Path) -> int | None:
    """Locks a folder until the descriptor is closed; None if it is in use, is gone, or cannot be locked."""
    try:
        return open_locked(folder / _LOCK)
    except OSError:  # also of a file system without locks
        return None
