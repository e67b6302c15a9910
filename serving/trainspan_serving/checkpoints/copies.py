"""The folder into which checkpoints are copied from a URL; it has nothing else, and one live process copies into it.

```
checkpoints/policy-000003/         complete: every file had its hash
checkpoints/.pull-policy-000004/   being copied, or continued after a kill
checkpoints/.old-policy-000001/    being deleted
checkpoints/.pull-lock             locked by the process
```
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Final

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.artifacts.checkpoint_files import CHECKPOINT_NAME, CheckpointFiles
from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.files.durable import sha256_of, sync
from trainspan_schemas.files.locks import open_locked
from trainspan_serving.checkpoints.source import CheckpointSource, CopyFailedError

__all__ = ["CopiesFolder", "claim_copies"]

_log = logging.getLogger(__name__)

_PARTIAL: Final = ".pull-"
_OLD: Final = ".old-"
_LOCK: Final = ".pull-lock"
_KEEP: Final = 3


def claim_copies(root: Path) -> int:
    """Locks the folder for copies by this process; returns the lock's descriptor.

    Raises CheckpointError if another server holds it, or if it has files that were not copied into it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not (root / _LOCK).exists() and any(root.iterdir()):
            raise CheckpointError(
                f"{root} has files that were not copied there: name another folder with --checkpoints"
            )
        descriptor = open_locked(root / _LOCK)
    except OSError as error:
        raise CheckpointError(f"cannot copy checkpoints into {root}: {error.strerror or error}") from error
    if descriptor is None:
        raise CheckpointError(f"another policy server copies checkpoints into {root}: give each its own --checkpoints")
    return descriptor


class CopiesFolder:
    """The copies below `root`, in a folder for each policy if there are several. All methods block.

    Raises CheckpointError as `claim_copies` does.
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

        Does nothing if there is none of that name under the URL. The folders `in_use` are neither replaced nor deleted.
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
        """Deletes a copy whose bytes changed on this disk, so that it is copied again; leaves what is in use."""
        folder = self._root / (policy or "") / checkpoint
        if folder.is_dir() and folder.resolve() not in in_use:
            _delete(folder)

    def _check_replaceable(self, folder: Path, in_use: Set[Path]) -> None:
        """Raises CopyFailedError if a checkpoint with other content must stay."""
        if folder.exists() and folder.resolve() in in_use:
            raise CopyFailedError(
                f"{folder} is in service and differs from {folder.name} at {self._source.url}: restart this server with "
                "another --checkpoints"
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
        self._source.fetch(listed, policy, partial, on_bytes)
        sync(partial)
        copied_ns = time.time_ns()
        os.utime(partial, ns=(copied_ns, copied_ns))  # by which `_make_room` knows the oldest
        self._check_replaceable(into / name, in_use())
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
    if not folder.is_dir() or {path.name for path in folder.iterdir()} != listed.files.keys():
        return False
    are_proven = _weights_of(folder) is not None
    return all(
        (folder / name).stat().st_size == file.size_bytes
        and ((are_proven and name.endswith(".safetensors")) or sha256_of(folder / name) == file.sha256)
        for name, file in listed.files.items()
    )


def _weights_of(folder: Path) -> str | None:
    try:
        return CheckpointMeta.read(folder).weights_sha256
    except CheckpointError:
        return None


def _make_room(into: Path, partial: Path, listed: CheckpointFiles, in_use: Set[Path]) -> None:
    """Deletes other unfinished copies, and old ones but the newest and those in use.

    Raises CopyFailedError if the rest of this one does not fit.
    """
    for path in into.iterdir():
        if path.name.startswith((_PARTIAL, _OLD)) and path != partial:
            shutil.rmtree(path, ignore_errors=True)
    copies = [path for path in into.glob("*/trainspan.json") if not path.parent.name.startswith(".")]
    for folder in sorted((path.parent for path in copies), key=lambda path: path.stat().st_mtime_ns)[: 1 - _KEEP]:
        if folder.resolve() not in in_use:
            _delete(folder)
    needed = sum(file.size_bytes for name, file in listed.files.items() if not (partial / name).exists())
    if (free := shutil.disk_usage(into).free) < needed:
        raise CopyFailedError(f"no room for {listed.checkpoint} in {into}: {needed} bytes, {free} are free")


def _delete(folder: Path) -> None:
    """Takes the folder's name away first: no checkpoint is ever there in part."""
    old = folder.with_name(_OLD + folder.name)
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):  # another thread was faster
        folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)
