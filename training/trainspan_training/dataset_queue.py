"""Selects the next dataset: the newest one, or each new one as it appears."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainspan_schemas.artifacts.dataset import dataset_dirs, manifest_path
from trainspan_schemas.errors import DatasetError
from trainspan_training.checkpoints.ledger import CheckpointLedger
from trainspan_training.data.dataset import DatasetFolder, open_dataset

__all__ = ["follow", "newest"]

log = logging.getLogger(__name__)

POLL_S = 0.1


def newest(path: Path, ledger: CheckpointLedger) -> DatasetFolder:
    """The dataset at `path`, or the newest unconsumed one in that folder.

    A skipped, aborted or refused dataset is used again only if `path` is the dataset itself. Raises DatasetError if
    there is none, or if the dataset at `path` was already trained.
    """
    if manifest_path(path).exists():
        dataset = open_dataset(path)
        entry = ledger.of_dataset(dataset.sha256)
        if entry and entry.event == "trained":
            raise DatasetError(
                f"{path} was trained already ({entry.checkpoint}): build another with `trainspan dataset`"
            )
        return dataset
    folders = dataset_dirs(path)
    if not folders:
        raise DatasetError(f"no dataset in {path}: build one with `trainspan dataset`")
    for folder in reversed(folders):
        dataset = open_dataset(folder)
        if ledger.of_dataset(dataset.sha256) is None:
            return dataset
    raise DatasetError(
        f"all {len(folders)} datasets in {path} are used already: build the next with `trainspan dataset`"
    )


def follow(root: Path, ledger: CheckpointLedger, idle: Callable[[], None]) -> Iterator[DatasetFolder]:
    """Yields each unconsumed dataset under `root`, by round, forever. Calls `idle` while there is none."""
    seen: set[tuple[str, int, int]] = set()
    while True:
        for folder in dataset_dirs(root):
            if (version := _version(folder)) in seen:
                continue
            seen.add(version)
            try:
                dataset = open_dataset(folder)
            except DatasetError as error:
                log.error("dataset=%s left out: %s", folder, error)
                continue
            if ledger.of_dataset(dataset.sha256) is None:
                yield dataset
                break  # rescan: an earlier round may have appeared meanwhile
        else:
            idle()
            time.sleep(POLL_S)


def _version(folder: Path) -> tuple[str, int, int]:
    """Distinguishes a folder from a later one at the same path."""
    try:
        manifest = manifest_path(folder).stat()
    except OSError:
        return folder.name, 0, 0
    return folder.name, manifest.st_ino, manifest.st_mtime_ns
