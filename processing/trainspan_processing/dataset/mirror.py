"""What this machine has of the datasets under a URL, as folders like those of local datasets.

```
known/round-0007/                 empty
known/round-0007.about/           manifest.json, and rollouts.jsonl once it was needed
datasets/round-0007/              the rows of a dataset that was read here, verified
datasets/round-0007.about/        its manifest and ledger
```
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainspan_processing.dataset.ledger import Earlier
from trainspan_processing.dataset.remote import Pointer, RemoteDatasets, read_all
from trainspan_schemas.artifacts.dataset import (
    ABOUT,
    LEDGER_FILE,
    MANIFEST,
    about_dir,
    dataset_dirs,
    manifest_path,
    round_of,
)
from trainspan_schemas.errors import DatasetError, UsageError
from trainspan_schemas.files.durable import sha256_of
from trainspan_schemas.files.locks import locked
from trainspan_schemas.files.objects import Objects, check_url, fetch_files
from trainspan_schemas.home import is_url, make_home, remote_dir

__all__ = ["Mirror", "forget", "known_dataset", "local_dataset", "write_pointer"]

KEPT: Final = 4
"""Datasets whose rows stay on this machine: those that were read last."""
_POINTER: Final = "published.json"
_PART: Final = re.compile(r"part-\d+\.parquet")


@dataclass(frozen=True, slots=True)
class Mirror:
    """The datasets under one URL.

    Methods raise StorageError as those of Objects do, DatasetError if what describes a dataset is damaged.
    """

    url: str

    @classmethod
    def of(cls, url: str) -> "Mirror":
        """Raises UsageError if the URL is malformed or has credentials in it."""
        make_home()
        return cls(check_url(url))

    @property
    def remote(self) -> RemoteDatasets:
        return RemoteDatasets(Objects(self.url))

    @property
    def known(self) -> Path:
        """The folder with the manifests of all datasets as of the last refresh; their rows are not in it."""
        return (remote_dir(self.url) / "known").absolute()

    def rows_url(self, known: Path) -> str:
        """The folder of the rows of a dataset in `known`, for other readers."""
        pointer = self._pointer_of(known.name)
        return f"{self.url}/{pointer.folder if pointer else known.name}"

    def refresh(self, *, only: str | None = None, with_ledgers: bool = False) -> None:
        """Reads the manifests of new datasets, or of the one named `only`, and the ledgers if they are wanted.

        Those of datasets that are gone are removed.
        """
        self.known.mkdir(parents=True, exist_ok=True)
        published = self.remote.pointers() if only is None else self.remote.read_pointers([only])
        with locked(self.known):
            for folder in dataset_dirs(self.known):
                if folder.name not in published and only in (None, folder.name):
                    forget(folder)
            changed = {name: pointer for name, pointer in published.items() if self._pointer_of(name) != pointer}
            manifests = read_all(
                self.remote.objects, {f"{pointer.folder}{ABOUT}/{MANIFEST}": name for name, pointer in changed.items()}
            )
            for name, pointer in changed.items():
                manifest = manifests.get(name, b"")
                if hashlib.sha256(manifest).hexdigest() != pointer.manifest_sha256:
                    location = f"{self.url}/{pointer.folder}{ABOUT}/{MANIFEST}"
                    raise DatasetError(f"{location} is missing or changed: build the dataset again")
                _write_new(self.known / name, pointer, manifest)
            for name, pointer in published.items() if with_ledgers else ():
                self._read_ledger(name, pointer)

    def fetch(self, known: Path) -> Path:
        """The dataset of a folder in `known` as a local one with its rows, each file verified by the manifest's hash.

        What an earlier call has read is not read again, even if it was cut off; KEPT datasets stay.
        """
        pointer = self._pointer_of(known.name)
        if pointer is None:
            raise DatasetError(f"{self.url}/{known.name} is gone: it was removed from the store")
        folder = remote_dir(self.url).absolute() / "datasets" / known.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent):
            _keep_newest(folder)
            files = _files_of(manifest_path(known))
            if not self._is_complete(folder, pointer, files):
                self._read_ledger(known.name, pointer)
                self._read_rows(folder, pointer, files)
                shutil.copytree(about_dir(known), folder.with_name(folder.name + ABOUT))
                (folder.parent / f".{pointer.folder}").rename(folder)
            os.utime(folder)
        return folder

    def fetch_earlier(self, folder: Path) -> None:
        """Puts what describes the datasets that a fetched one was built after next to it, as far as they exist."""
        with locked(folder.parent):
            earlier = Earlier.of_record(json.loads(manifest_path(folder).read_bytes()).get("earlier"))
            for known in dataset_dirs(self.known):
                about = about_dir(known)
                number = round_of(known.name)
                if number is not None and number in earlier and about.exists():
                    shutil.copytree(about, folder.parent / about.name, dirs_exist_ok=True)

    def _read_rows(self, folder: Path, pointer: Pointer, files: Mapping[str, str]) -> None:
        """Reads the files that are not there yet into a hidden folder, after removing what is in the way."""
        forget(folder)
        unfinished = folder.parent / f".{pointer.folder}"
        for left in folder.parent.glob(".round-*"):
            if left != unfinished:
                shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir(exist_ok=True)
        fetch_files(self.remote.objects.under(pointer.folder), files, unfinished)

    @staticmethod
    def _is_complete(folder: Path, pointer: Pointer, files: Mapping[str, str]) -> bool:
        try:
            is_same = sha256_of(manifest_path(folder)) == pointer.manifest_sha256
            return is_same and all(sha256_of(folder / name) == sha256 for name, sha256 in files.items())
        except FileNotFoundError:
            return False

    def _read_ledger(self, name: str, pointer: Pointer) -> None:
        path = self.known / (name + ABOUT) / LEDGER_FILE
        if path.exists():
            return
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            self.remote.objects.under(pointer.folder + ABOUT).download(LEDGER_FILE, temporary, pointer.ledger_sha256)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _pointer_of(self, name: str) -> Pointer | None:
        try:
            return Pointer.from_json(name, (self.known / (name + ABOUT) / _POINTER).read_bytes())
        except (OSError, ValueError):
            return None


def local_dataset(location: str, *, with_earlier: bool = False) -> Path:
    """The folder of a dataset that is named by its folder, or by a URL such as `s3://bucket/prefix/round-0007`.

    `with_earlier`: next to it are the ledgers of those that it was built after. Raises UsageError if there is none at the
    URL, DatasetError as `Mirror` does.
    """
    if not is_url(location):
        return Path(location)
    mirror, known = known_dataset(location, with_earlier=with_earlier)
    folder = mirror.fetch(known)
    if with_earlier:
        mirror.fetch_earlier(folder)
    return folder


def known_dataset(url: str, *, with_earlier: bool = False) -> tuple[Mirror, Path]:
    """The dataset of a URL: the folder with its manifest and without its rows.

    `with_earlier`: next to it are the manifests and ledgers of the others. Raises UsageError if there is none.
    """
    root, _, name = check_url(url).rpartition("/")
    if round_of(name) is None:
        raise UsageError(f"no dataset at {url}: name one of its datasets, such as {url.rstrip('/')}/round-0003")
    mirror = Mirror.of(root)
    mirror.refresh(only=None if with_earlier else name, with_ledgers=with_earlier)
    known = mirror.known / name
    if not known.exists():
        raise UsageError(f"no dataset at {url}: there is no {url}.json")
    return mirror, known


def _write_new(folder: Path, pointer: Pointer, manifest: bytes) -> None:
    """Records a dataset without its ledger; the pointer last."""
    about = folder.with_name(folder.name + ABOUT)
    shutil.rmtree(about, ignore_errors=True)
    about.mkdir()
    (about / MANIFEST).write_bytes(manifest)
    write_pointer(about, pointer)
    folder.mkdir(exist_ok=True)


def write_pointer(about: Path, pointer: Pointer) -> None:
    """Records which build a folder in `known` describes."""
    (about / _POINTER).write_bytes(pointer.to_json())


def _files_of(manifest: Path) -> dict[str, str]:
    """Name → sha256 of the files of rows. Raises DatasetError if the manifest names other files, such as `../x`."""
    try:
        files = {str(file["name"]): str(file["sha256"]) for file in json.loads(manifest.read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{manifest} is malformed ({error!r}): build the dataset again") from error
    for name in files:
        if not _PART.fullmatch(name):
            raise DatasetError(f"{manifest} names the file {name[:80]!r}: build the dataset again")
    return files


def _keep_newest(wanted: Path) -> None:
    """Removes all datasets next to this one but the last that were read."""
    others = [folder for folder in dataset_dirs(wanted.parent) if folder != wanted]
    for folder in sorted(others, key=lambda folder: folder.stat().st_mtime_ns)[: -(KEPT - 1)]:
        forget(folder)


def forget(folder: Path) -> None:
    """Removes a dataset and what describes it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder.with_name(folder.name + ABOUT), ignore_errors=True)
