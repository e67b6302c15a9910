"""The folder into which checkpoints are copied from the trainer's machine; one live process copies into it.

```
checkpoints/policy-000003/         complete: every file had its hash
checkpoints/.pull-policy-000004/   being copied, or continued after a kill
checkpoints/.old-policy-000001/    being deleted
checkpoints/.pulled                names of the copies, oldest first; other checkpoints in the folder are never touched
checkpoints/.pull-lock             locked by the process
```
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Final

from trainspan_schemas.artifacts.checkpoint import CANARY_FILE, META_FILE, CheckpointMeta
from trainspan_schemas.artifacts.checkpoint_files import CHECKPOINT_NAME, CheckpointFiles
from trainspan_schemas.durable import sync
from trainspan_schemas.errors import CheckpointError
from trainspan_serving.checkpoints.pull import CheckpointSource, CopyFailedError, UnlistedFileError

__all__ = ["CopiesFolder", "claim_copies"]

_log = logging.getLogger(__name__)

_PARTIAL: Final = ".pull-"
_OLD: Final = ".old-"
_PULLED: Final = ".pulled"
_LOCK: Final = ".pull-lock"
_KEEP: Final = 3


def claim_copies(root: Path) -> int:
    """Locks the folder for copies by this process; returns the lock's descriptor.

    The kernel releases the lock however the process ends. Raises CheckpointError if another server holds it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise CheckpointError(f"cannot copy checkpoints into {root}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise CheckpointError(
            f"another policy server copies checkpoints into {root}: give each its own --checkpoints"
        ) from error
    return descriptor


class CopiesFolder:
    """The copies below `root`, in a folder for each policy if there are several. All methods block.

    Raises CheckpointError if another live process copies into the folder.
    """

    def __init__(self, root: Path, source: CheckpointSource) -> None:
        self._lock = claim_copies(root)
        self._root, self._source = root, source

    def close(self) -> None:
        os.close(self._lock)

    def pull(
        self,
        checkpoint: str,
        policy: str | None,
        weights_sha256: str | None = None,
        *,
        in_use: Callable[[], Set[Path]] = frozenset,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Copies a checkpoint unless it is there with the same content. Raises CopyFailedError.

        Does nothing if the trainer's machine has none of that name. The folders `in_use` are neither replaced nor deleted.
        An interrupted copy is continued; the checkpoint appears under its name once every file has its hash.
        """
        if not CHECKPOINT_NAME.fullmatch(checkpoint):
            return  # whoever reads the folder refuses the name
        into = self._root / (policy or "")
        folder = into / checkpoint
        try:
            listed = self._source.files(checkpoint, policy)
        except CopyFailedError as error:
            if weights_sha256 is None or _weights_of(folder) != weights_sha256:
                raise
            _log.warning("checkpoint=%s is here already, and cannot be compared: %s", checkpoint, error)
            return
        try:
            if listed is None or _is_copy(folder, listed):
                return
            self._check_replaceable(folder, in_use())
            self._copy(listed, policy, into, in_use, on_bytes)
        except OSError as error:
            raise CopyFailedError(f"cannot copy {checkpoint} into {into}: {error.strerror or error}") from error

    def discard(self, checkpoint: str, policy: str | None, in_use: Set[Path]) -> None:
        """Deletes a copy whose bytes changed on this disk, so that it is copied again; leaves what is in use or no copy."""
        folder = self._root / (policy or "") / checkpoint
        if checkpoint in _pulled(folder.parent) and folder.is_dir() and folder.resolve() not in in_use:
            _delete(folder)

    def _check_replaceable(self, folder: Path, in_use: Set[Path]) -> None:
        """Raises CopyFailedError if a checkpoint with other content must stay."""
        if not folder.exists() or (folder.name in _pulled(folder.parent) and folder.resolve() not in in_use):
            return
        why = "is in service" if folder.resolve() in in_use else "was not copied from there"
        raise CopyFailedError(
            f"{folder} {why} and differs from {folder.name} at {self._source.url}: restart this server with another "
            "--checkpoints"
        )

    def _copy(
        self,
        listed: CheckpointFiles,
        policy: str | None,
        into: Path,
        in_use: Callable[[], Set[Path]],
        on_bytes: Callable[[int], None],
    ) -> None:
        name, began = listed.checkpoint, time.monotonic()
        partial = into / f"{_PARTIAL}{name}"
        partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(into, partial, listed, in_use())
        is_listed_again = False
        for file_name in listed.files:
            try:
                self._source.fetch(partial / file_name, listed.files[file_name], on_bytes)
            except UnlistedFileError:
                # `trainspan weights` was started again: it knows the files of the lists that it was asked for.
                if is_listed_again or self._source.files(name, policy) != listed:
                    raise
                is_listed_again = True
                self._source.fetch(partial / file_name, listed.files[file_name], on_bytes)
        for other in {path.name for path in partial.iterdir()} - listed.files.keys():
            (partial / other).unlink()
        sync(partial)
        self._check_replaceable(into / name, in_use())
        _note(into, [*(other for other in _pulled(into) if other != name), name])
        if (into / name).exists():
            _delete(into / name)
        partial.rename(into / name)
        sync(into)
        seconds = time.monotonic() - began
        _log.info("copied checkpoint=%s bytes=%d seconds=%.1f", name, listed.size_bytes, seconds)


def _is_copy(folder: Path, listed: CheckpointFiles) -> bool:
    """Whether the folder has the listed checkpoint.

    All files have the listed sizes, and all but the weights, whose hash is in `trainspan.json`, are equal.
    """
    if any(_size(folder / name) != file.size_bytes for name, file in listed.files.items()):
        return False
    compared = {META_FILE, CANARY_FILE, *listed.files}
    if _weights_of(folder) is not None:
        compared = {name for name in compared if not name.endswith(".safetensors")}
    return all(_hash(folder / name) == _listed_hash(listed, name) for name in compared)


def _listed_hash(listed: CheckpointFiles, name: str) -> str | None:
    file = listed.files.get(name)
    return None if file is None else file.sha256


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _hash(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _weights_of(folder: Path) -> str | None:
    try:
        return CheckpointMeta.read(folder).weights_sha256
    except (CheckpointError, OSError):
        return None


def _make_room(into: Path, partial: Path, listed: CheckpointFiles, in_use: Set[Path]) -> None:
    """Deletes other unfinished copies and old ones. Raises CopyFailedError if the rest of this one does not fit."""
    for path in into.iterdir():
        if path.name.startswith((_PARTIAL, _OLD)) and path != partial:
            shutil.rmtree(path, ignore_errors=True)
    _prune(into, in_use, _KEEP - 1)
    there = ((partial / name, file.size_bytes) for name, file in listed.files.items())
    needed = sum(max(0, size - (path.stat().st_size if path.exists() else 0)) for path, size in there)
    if (free := shutil.disk_usage(into).free) < needed:
        raise CopyFailedError(f"no room for {listed.checkpoint} in {into}: {needed} bytes, {free} are free")


def _prune(into: Path, in_use: Set[Path], keep: int) -> None:
    """Deletes copied checkpoints but the newest `keep` and those in use; others in the folder stay."""
    there = [name for name in _pulled(into) if (into / name).is_dir()]
    for name in there[:-keep]:
        if (into / name).resolve() not in in_use:
            _delete(into / name)
    _note(into, [name for name in there if (into / name).exists()])


def _delete(folder: Path) -> None:
    """Takes the folder's name away first: no checkpoint is ever there in part."""
    old = folder.with_name(_OLD + folder.name)
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):  # another thread was faster
        folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _pulled(into: Path) -> list[str]:
    """Names of the copies, oldest first."""
    with contextlib.suppress(FileNotFoundError):
        return list(dict.fromkeys((into / _PULLED).read_text().split()))
    return []


def _note(into: Path, names: list[str]) -> None:
    temporary = into / f"{_PULLED}.tmp"
    temporary.write_text("".join(f"{name}\n" for name in names))
    sync(temporary)
    temporary.replace(into / _PULLED)
    sync(into)
