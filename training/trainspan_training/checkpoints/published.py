"""The checkpoints under `[train] checkpoints_url`, for policy servers that do not see the trainer's folder.

One trainer publishes under a URL. A checkpoint is published before any server is asked to swap to it, and removed once its
folder is; `trainspan_schemas/artifacts/checkpoint_files.py` has the layout.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.artifacts.checkpoint_files import (
    ACCEPTED_FILE,
    CHECKPOINT_NAME,
    CheckpointFiles,
    ListedFile,
    list_file,
)
from trainspan_schemas.errors import StorageError
from trainspan_schemas.files.durable import sha256_of
from trainspan_schemas.policy_server import Offer
from trainspan_training.checkpoints.folder import accepted_checkpoint
from trainspan_training.checkpoints.ledger import CheckpointLedger
from trainspan_training.checkpoints.replica_swap import publish
from trainspan_training.checkpoints.swap_request import PolicyAddress, Swap, always

__all__ = ["announce", "publish_files", "remove_old", "swap_in", "tolerated"]

log = logging.getLogger(__name__)


def swap_in(
    folder: Path, address: PolicyAddress, *, retry_for_s: float, was_there: bool, is_wanted: Callable[[], bool] = always
) -> Swap:
    """Publishes a checkpoint and swaps it in at each server; see `replica_swap.publish`.

    `failed` if it cannot be published. What goes back in service if it is refused is the last accepted one of its folder.
    """
    try:
        publish_files(folder, address)
    except StorageError as error:
        return Swap("failed", {"error": str(error)})
    served = accepted_checkpoint(folder.parent)
    accepted = Offer.of(served) if served else None
    offer = Offer.of(folder)
    return publish(address, offer, accepted, retry_for_s=retry_for_s, was_there=was_there, is_wanted=is_wanted)


def publish_files(folder: Path, address: PolicyAddress) -> None:
    """Uploads a checkpoint unless it is there; without a URL nothing is done. Raises StorageError."""
    objects = address.checkpoints
    if objects is None:
        return
    name, listed = list_file(folder.name), _list(folder)
    if objects.read([name]).get(name) == listed.to_json():
        return
    objects.remove(name)  # that of an earlier run, whose files are overwritten
    for file in listed.files:
        objects.under(folder.name).upload(file, folder / file)
    objects.put(name, listed.to_json())


def announce(root: Path, address: PolicyAddress) -> None:
    """Says under the URL which checkpoint was accepted last: servers that start swap to it. Raises StorageError."""
    objects = address.checkpoints
    if objects is None:
        return
    if (accepted := accepted_checkpoint(root)) is None:
        objects.remove(ACCEPTED_FILE)
    else:
        publish_files(accepted, address)
        objects.put(ACCEPTED_FILE, Offer.of(accepted).to_json(None).encode())


def remove_old(root: Path, address: PolicyAddress) -> None:
    """Removes those of this folder's checkpoints from the URL that the folder has no more. Raises StorageError."""
    objects = address.checkpoints
    if objects is None:
        return
    gone = {entry.checkpoint for entry in CheckpointLedger(root).entries if entry.checkpoint}
    gone = {name for name in gone if not (root / name).exists()}
    there = set(objects.names())
    for name in gone:
        for published in {list_file(name), name} & there:
            objects.remove(published)


@contextmanager
def tolerated() -> Iterator[None]:
    """Logs a StorageError: what is not published now is published with the next round, or when the trainer starts."""
    try:
        yield
    except StorageError as error:
        log.warning("the checkpoints' URL is not up to date: %s", error)


def _list(folder: Path) -> CheckpointFiles:
    """The files with the hashes in `trainspan.json`, which the trainer computed as it wrote them, or with their own."""
    known = CheckpointMeta.read(folder).weights_files or {}
    paths = sorted(path for path in folder.iterdir() if path.is_file() and CHECKPOINT_NAME.fullmatch(path.name))
    files = {path.name: ListedFile(known.get(path.name) or sha256_of(path), path.stat().st_size) for path in paths}
    return CheckpointFiles(folder.name, files)
