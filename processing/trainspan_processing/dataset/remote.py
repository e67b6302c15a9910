"""Datasets under a URL: a folder with a name of its own for each build, and one small object that publishes it.

```
round-0007.json                            {"folder": "round-0007.68f0…", hashes}: the dataset exists once this object does
round-0007.68f0…/part-00000.parquet        its rows, and nothing else
round-0007.68f0….about/manifest.json       and its ledger and report
round-0007.68f0….calls/                    of an unfinished build: spilled calls, if it runs on several machines
```

Stores have no rename, and a build never writes where another one does. The last object is written only if there is none, so of
two builds with one number one fails, and no reader ever sees files of both. A build's name begins with its time, by which the
next one recognizes what a killed one left.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from trainspan_schemas.artifacts.dataset import ABOUT, round_of
from trainspan_schemas.errors import DatasetError
from trainspan_schemas.files.objects import Objects

__all__ = ["CALLS", "Pointer", "RemoteDatasets", "new_folder", "read_all"]

CALLS: Final = ".calls"
_POINTER: Final = ".json"
_AT_ONCE: Final = 64
"""Small objects that are read together."""
_FOLDER: Final = re.compile(r"(round-\d{4,})\.([0-9a-f]{8})[0-9a-f]{8}")
"""Dataset, Unix time in hex, and a random part."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_LEFT_S: Final = 7 * 86_400.0
"""Age after which an unpublished build counts as dead."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """The object that publishes a dataset."""

    folder: str
    manifest_sha256: str
    ledger_sha256: str

    def to_json(self) -> bytes:
        return (json.dumps({"version": 1, **asdict(self)}, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, name: str, content: bytes) -> "Pointer":
        """The pointer of the dataset `name`. Raises ValueError if it is malformed, or names anything but a build of it."""
        record = json.loads(content)
        if not isinstance(record, dict) or record.get("version") != 1:
            raise ValueError("unknown version")
        pointer = cls(*(str(record.get(key)) for key in ("folder", "manifest_sha256", "ledger_sha256")))
        match = _FOLDER.fullmatch(pointer.folder)
        if match is None or match[1] != name:
            raise ValueError(f"folder {pointer.folder[:80]!r}")
        if not _SHA256.fullmatch(pointer.manifest_sha256) or not _SHA256.fullmatch(pointer.ledger_sha256):
            raise ValueError("no sha256")
        return pointer


@dataclass(frozen=True, slots=True)
class RemoteDatasets:
    """The datasets under a URL. Methods raise StorageError as those of Objects do."""

    objects: Objects

    def pointers(self) -> dict[str, Pointer]:
        """Folder name, such as `round-0007`, → pointer, by number. Raises DatasetError if one is malformed."""
        listed = [name.removesuffix(_POINTER) for name in self.objects.names() if name.endswith(_POINTER)]
        return self.read_pointers(name for name in listed if round_of(name) is not None)

    def read_pointers(self, names: Iterable[str]) -> dict[str, Pointer]:
        """The pointers of these datasets; those that do not exist are left out. Raises DatasetError if one is malformed."""
        pointers = {}
        for name, content in read_all(self.objects, {f"{name}{_POINTER}": name for name in names}).items():
            try:
                pointers[name] = Pointer.from_json(name, content)
            except ValueError as error:
                raise DatasetError(f"{self.objects.url}/{name}{_POINTER} is malformed ({error}): remove it") from error
        return dict(sorted(pointers.items(), key=lambda item: round_of(item[0]) or 0))

    def publish(self, name: str, pointer: Pointer) -> bool:
        """Writes the pointer unless there is one; returns whether `name` is now this build.

        A request whose answer was lost is repeated, and then finds the pointer that it wrote itself.
        """
        if self.objects.create(f"{name}{_POINTER}", pointer.to_json()):
            return True
        return self.read_pointers([name]).get(name) == pointer

    def end(self, folder: str, *, is_kept: bool) -> None:
        """Removes the spilled calls of a build, and its rows as well unless they are kept."""
        self.objects.remove(folder + CALLS)
        if not is_kept:
            self.objects.remove(folder)
            self.objects.remove(folder + ABOUT)

    def clear(self) -> None:
        """Removes what killed builds left long ago."""
        names = set(self.objects.names())
        builds = {match[0]: match for match in map(_FOLDER.match, names) if match}
        count = Counter(match[1] for match in builds.values())
        old = {folder: match[1] for folder, match in builds.items() if time.time() - int(match[2], 16) > _LEFT_S}
        unsure = {
            folder: name
            for folder, name in old.items()
            if count[name] > 1 or f"{name}{_POINTER}" not in names or f"{folder}{CALLS}" in names
        }
        published = {pointer.folder for pointer in self.read_pointers(set(unsure.values())).values()}
        for folder in unsure:
            self.end(folder, is_kept=folder in published)


def new_folder(name: str) -> str:
    """A name for the folder of a build of the dataset `name`."""
    return f"{name}.{int(time.time()):08x}{os.urandom(4).hex()}"


def read_all(objects: Objects, wanted: Mapping[str, str]) -> dict[str, bytes]:
    """Content of small objects under their wanted names; those that do not exist are left out."""
    names, contents = list(wanted), dict[str, bytes]()
    for start in range(0, len(names), _AT_ONCE):
        read = objects.read(names[start : start + _AT_ONCE])
        contents |= {wanted[name]: content for name, content in read.items()}
    return contents
