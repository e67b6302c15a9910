"""Where a dataset is made before it is published as a whole: in a hidden folder, or in a folder of its own under a URL."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trainspan_processing.dataset.files import Files, LocalFiles, RemoteFiles, lock_folder
from trainspan_processing.dataset.mirror import Mirror, forget, write_pointer
from trainspan_processing.dataset.remote import CALLS, Pointer, new_folder
from trainspan_schemas.artifacts.dataset import ABOUT, LEDGER_FILE, MANIFEST
from trainspan_schemas.errors import DatasetError, StorageError
from trainspan_schemas.files.durable import sha256_of
from trainspan_schemas.files.locks import locked

__all__ = ["LocalScratch", "RemoteScratch", "Scratch", "local_scratch", "remote_scratch"]

log = logging.getLogger(__name__)


class Scratch(Protocol):
    """A dataset that is being made."""

    @property
    def rows(self) -> Files:
        """Its parts."""
        ...

    @property
    def calls(self) -> Files:
        """Spilled calls, which are not published."""
        ...

    @property
    def about(self) -> Path:
        """The local folder of its manifest, ledger and reports."""
        ...

    def publish(self) -> None:
        """Makes the dataset appear as a whole. Raises DatasetError if another command made it meanwhile."""
        ...


@dataclass(frozen=True, slots=True)
class LocalScratch:
    """A hidden folder next to the dataset's own."""

    root: Path
    target: Path

    @property
    def rows(self) -> LocalFiles:
        return LocalFiles(self.root / "rows", unfinished=self.root / "calls")

    @property
    def calls(self) -> LocalFiles:
        return LocalFiles(self.root / "calls")

    @property
    def about(self) -> Path:
        return self.root / "about"

    def publish(self) -> None:
        """Renames both folders. The dataset exists once its rows do, so the rows come last."""
        with locked(self.target.parent):
            if self.target.exists():
                raise _created_meanwhile(str(self.target))
            self.rename()

    def rename(self) -> None:
        """See `publish`."""
        about = self.target.with_name(self.target.name + ABOUT)
        shutil.rmtree(about, ignore_errors=True)  # of a command that was killed between its two renames
        self.about.rename(about)
        (self.root / "rows").rename(self.target)


@contextmanager
def local_scratch(target: Path) -> Iterator[LocalScratch]:
    """A hidden folder next to `target` to fill and publish; unpublished content is removed, also that of killed commands.

    Its name is random: processes of several containers, which share the parent, have the same pid.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = LocalScratch(target.absolute().with_name(f".{new_folder(target.name)}"), target)
    with locked(target.parent):
        for other in scratch.root.parent.glob(f".{target.name}.*"):
            if (left := lock_folder(other)) is not None:
                shutil.rmtree(other, ignore_errors=True)
                os.close(left)
        for name in ("", "rows", "calls", "about"):
            (scratch.root / name).mkdir()
        lock = lock_folder(scratch.root)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch.root, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@dataclass(slots=True)
class RemoteScratch:
    """A folder of its own under the URL for rows, and a local one for what describes them."""

    mirror: Mirror
    local: LocalScratch
    is_spread: bool
    """Whether other machines make the dataset, so that spilled calls are under the URL too."""
    folder: str
    is_published: bool | None = field(default=False, init=False)
    """Whether its pointer was written; None if the store's answer was lost."""

    @property
    def rows(self) -> RemoteFiles:
        return RemoteFiles(self.mirror.remote.objects.under(self.folder), None if self.is_spread else self.local.root)

    @property
    def calls(self) -> Files:
        if not self.is_spread:
            return self.local.calls
        return RemoteFiles(self.mirror.remote.objects.under(self.folder + CALLS))

    @property
    def about(self) -> Path:
        return self.local.about

    def publish(self) -> None:
        """Uploads what describes the rows, then writes the pointer, and records the dataset on this machine as well."""
        name, remote = self.local.target.name, self.mirror.remote
        for path in sorted(self.about.iterdir()):
            remote.objects.under(self.folder + ABOUT).upload(path.name, path)
        hashes = [sha256_of(self.about / file) for file in (MANIFEST, LEDGER_FILE)]
        pointer = Pointer(self.folder, *hashes)
        self.is_published = None
        self.is_published = remote.publish(name, pointer)
        if not self.is_published:
            raise _created_meanwhile(f"{self.mirror.url}/{name}")
        write_pointer(self.about, pointer)
        with locked(self.local.target.parent):
            forget(self.local.target)  # recorded by another process that saw it in the meantime
            self.local.rename()


@contextmanager
def remote_scratch(mirror: Mirror, known: Path, *, is_spread: bool) -> Iterator[RemoteScratch]:
    """A folder under the URL to fill and publish as the dataset of the folder `known`; unpublished content is removed.

    What killed commands left under the URL long ago is removed first. Raises StorageError if the store cannot be read and written.
    """
    mirror.remote.clear()
    with local_scratch(known) as local:
        scratch = RemoteScratch(mirror, local, is_spread, new_folder(known.name))
        # A store that cannot be written ends the command now, and not after the rows are made.
        mirror.remote.objects.under(scratch.folder + CALLS).put("begun", b"")
        try:
            yield scratch
        finally:
            _end(scratch)


def _end(scratch: RemoteScratch) -> None:
    """Removes what is not published. A store that fails now must not hide the command's result: a later command removes it.

    It also finds out whether a dataset was published if the answer was lost.
    """
    if scratch.is_published is None:
        return
    try:
        scratch.mirror.remote.end(scratch.folder, is_kept=scratch.is_published)
    except StorageError as error:
        log.warning("unfinished files of %s remain for a week: %s", scratch.folder, error)


def _created_meanwhile(location: str) -> DatasetError:
    """The error of the later of two commands that build the same dataset."""
    return DatasetError(f"another command created {location} in the meantime: run this one again")
