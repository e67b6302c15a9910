"""Selects the next dataset: the newest one, or each new one as it appears."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from trainspan_schemas.artifacts.dataset import dataset_dirs, manifest_path
from trainspan_schemas.errors import DatasetError, StorageError
from trainspan_training.checkpoints.ledger import CheckpointLedger
from trainspan_training.data.dataset import DatasetFolder, open_dataset

__all__ = ["Upstream", "fetched", "follow", "newest"]

log = logging.getLogger(__name__)

POLL_S = 0.1
REFRESH_S = 5.0
RESCAN_S = 5.0
"""A folder is scanned at least this often, because the times of some file systems are unreliable."""
COARSE_S = 3.0
"""Longer than the steps in which any file system counts time: a later change is another time of the folder."""
RETRY_S = 60.0


class Upstream(Protocol):
    """A store of datasets whose manifests are in a local folder, without the rows."""

    @property
    def url(self) -> str:
        """Where it is."""
        ...

    def refresh(self) -> None:
        """Updates the manifests in the folder. Raises DatasetError if the store cannot be read."""
        ...

    def fetch(self, known: Path) -> Path:
        """The dataset of a folder with a manifest, with its rows. Raises DatasetError if they cannot be read."""
        ...


def fetched(dataset: DatasetFolder, upstream: Upstream | None) -> DatasetFolder:
    """The dataset with its rows on this machine. Raises DatasetError if they cannot be read."""
    return dataset if upstream is None else open_dataset(upstream.fetch(dataset.path))


def newest(path: Path, ledger: CheckpointLedger, upstream: Upstream | None = None) -> DatasetFolder:
    """The dataset at `path`, or the newest unconsumed one in that folder, with its rows.

    A skipped, aborted or refused dataset is used again only if `path` is the dataset itself. Raises DatasetError if
    there is none, or if the dataset at `path` was already trained.
    """
    source = path if upstream is None else upstream.url
    if manifest_path(path).exists():
        dataset = open_dataset(path)
        entry = ledger.of_dataset(dataset.sha256)
        if entry and entry.event == "trained":
            name = path if upstream is None else f"{source}/{path.name}"
            raise DatasetError(
                f"{name} was trained already ({entry.checkpoint}): build another with `trainspan dataset`"
            )
        return fetched(dataset, upstream)
    folders = dataset_dirs(path)
    if not folders:
        raise DatasetError(f"no dataset in {source}: build one with `trainspan dataset`")
    for folder in reversed(folders):
        dataset = open_dataset(folder)
        if ledger.of_dataset(dataset.sha256) is None:
            return fetched(dataset, upstream)
    raise DatasetError(
        f"all {len(folders)} datasets in {source} are used already: build the next with `trainspan dataset`"
    )


def follow(
    root: Path, ledger: CheckpointLedger, idle: Callable[[], None] = lambda: None, upstream: Upstream | None = None
) -> Iterator[DatasetFolder]:
    """Yields each unconsumed dataset under `root`, by round, forever. Calls `idle` while there is none.

    An unusable dataset is logged and left out; one that cannot be read is tried again after RETRY_S. With `upstream`, `root` is
    updated every REFRESH_S while there is none, and datasets whose rows cannot be fetched are tried again, too.
    """
    seen: set[tuple[str, int, int]] = set()
    retry_at: dict[tuple[str, int, int], float] = {}
    refresh_at = time.monotonic() + REFRESH_S
    watch = _Watch(root)
    while True:
        for folder in dataset_dirs(root) if watch.is_due() else ():
            version = _version(folder)
            if version in seen or time.monotonic() < retry_at.get(version, 0.0):
                continue
            try:
                dataset = open_dataset(folder)
                if ledger.of_dataset(dataset.sha256) is None:
                    dataset = fetched(dataset, upstream)
            except (DatasetError, StorageError) as error:
                may_pass = upstream is not None or _may_pass(error)
                log.error("dataset=%s left out%s: %s", folder.name, f" for {RETRY_S:g} s" if may_pass else "", error)
                if not may_pass:
                    seen.add(version)
                retry_at[version] = time.monotonic() + RETRY_S
                continue
            seen.add(version)
            if ledger.of_dataset(dataset.sha256) is None:
                yield dataset
                watch.rescan()  # an earlier round may have appeared meanwhile
                break
        else:
            idle()
            time.sleep(POLL_S)
            if upstream is not None and time.monotonic() > refresh_at:
                _refresh(upstream)
                refresh_at = time.monotonic() + REFRESH_S


class _Watch:
    """Says when a folder is to be scanned: after a change, which costs one look at its time, and every RESCAN_S."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mtime_ns: int | None = None
        self._changed_at = time.monotonic()
        self._scanned_at = -math.inf

    def rescan(self) -> None:
        """Makes a scan due at once."""
        self._scanned_at = -math.inf

    def is_due(self) -> bool:
        """Whether to scan now; the next scan counts from then."""
        now, mtime_ns = time.monotonic(), _mtime_ns(self._folder)
        if mtime_ns != self._mtime_ns:
            self._mtime_ns, self._changed_at = mtime_ns, now
        is_due = now - self._changed_at < COARSE_S or now - self._scanned_at > RESCAN_S
        if is_due:
            self._scanned_at = now
        return is_due


def _mtime_ns(folder: Path) -> int | None:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None


def _may_pass(error: Exception) -> bool:
    """Whether the same manifest may be readable later. One that is missing is another one when it appears."""
    return isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)


def _refresh(upstream: Upstream) -> None:
    try:
        upstream.refresh()
    except (DatasetError, StorageError) as error:
        log.warning("no new datasets are seen until the store answers: %s", error)


def _version(folder: Path) -> tuple[str, int, int]:
    """Distinguishes a folder from a later one at the same path."""
    try:
        manifest = manifest_path(folder).stat()
    except OSError:
        return folder.name, 0, 0
    return folder.name, manifest.st_ino, manifest.st_mtime_ns
