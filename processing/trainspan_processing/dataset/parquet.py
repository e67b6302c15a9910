"""Writes a dataset: Parquet with the agreed columns and bytes that depend only on the rows; published as a whole."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trainspan_schemas.artifacts.dataset import ABOUT, COLUMNS
from trainspan_schemas.errors import DatasetError

__all__ = [
    "FileEntry",
    "Scratch",
    "folder_not_shared",
    "publish",
    "scratch_folder",
    "shared_file",
    "write_manifest",
    "write_part",
]

_DICTIONARY_BYTES: Final = 2**24
"""Limit of distinct texts per column and row group: constraints are long and repeat, and each should be stored once."""
_TYPES: Final[dict[str, Any]] = {
    "string": pa.string(),
    "int32": pa.int32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "list<int32>": pa.list_(pa.int32()),
    "list<float>": pa.list_(pa.float32()),
}
SCHEMA: Final = pa.schema([pa.field(name, _TYPES[kind]) for name, kind in COLUMNS.items()])
_LISTS: Final = [name for name, kind in COLUMNS.items() if kind.startswith("list")]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One Parquet file as listed in the manifest."""

    name: str
    sha256: str
    rows: int


def write_part(folder: Path, unfinished: Path, number: int, frames: Iterable[pl.DataFrame]) -> FileEntry:
    """Writes frames with COLUMNS to the part of this number, one row group per frame, and returns it once it is complete.

    Until then the file is in the folder `unfinished`, so writing it twice, even at once, leaves one complete file.
    """
    name, rows = f"part-{number:05d}.parquet", 0
    options: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": [name for name, kind in COLUMNS.items() if kind == "string"],
        "column_encoding": {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _LISTS},
        "write_statistics": [name for name in COLUMNS if name not in (*_LISTS, "constraint")],
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
    }
    with shared_file(folder / name, unfinished) as path:
        with pq.ParquetWriter(path, SCHEMA, **options) as writer:
            for frame in frames:
                columns = [_column(frame[name], SCHEMA.field(name).type) for name in COLUMNS]
                table = pa.Table.from_arrays(columns, schema=SCHEMA)
                writer.write_table(table, row_group_size=max(1, table.num_rows))
                rows += table.num_rows
                del frame, columns, table  # before the next frame is made
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(name, digest, rows)


@contextmanager
def shared_file(path: Path, unfinished: Path | None = None) -> Iterator[Path]:
    """A file in `unfinished` (default: the same folder) to write, which then becomes `path`. Raises DatasetError if there is no folder."""
    temporary = (unfinished or path.parent) / f".{path.name}.{uuid.uuid4().hex}"
    if not path.parent.is_dir():
        raise folder_not_shared(path.parent)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def folder_not_shared(folder: Path) -> DatasetError:
    """The error of a node that lacks files of the dataset."""
    return DatasetError(
        f"{folder} or its files are not on node {socket.gethostname()}: with engine = 'ray', --out must be in a folder "
        "that all nodes share, under the same path"
    )


def _column(values: pl.Series, kind: Any) -> Any:
    column = values.to_arrow()
    return column if column.type == kind else column.cast(kind)


@dataclass(frozen=True, slots=True)
class Scratch:
    """The folder in which a dataset is made before it is published."""

    root: Path

    @property
    def rows(self) -> Path:
        """The folder of its parts."""
        return self.root / "rows"

    @property
    def calls(self) -> Path:
        """The folder of spilled calls and unfinished parts, which is not published."""
        return self.root / "calls"

    @property
    def about(self) -> Path:
        """The folder of its manifest, ledger and reports."""
        return self.root / "about"


@contextmanager
def scratch_folder(target: Path) -> Iterator[Scratch]:
    """A hidden folder next to `target` to fill and `publish`; unpublished content is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Scratch(target.absolute().with_name(f".{target.name}.{os.getpid()}"))
    shutil.rmtree(scratch.root, ignore_errors=True)
    for folder in (scratch.root, scratch.rows, scratch.calls, scratch.about):
        folder.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch.root, ignore_errors=True)


def publish(scratch: Scratch, target: Path) -> None:
    """Renames both folders. The dataset exists once its rows do, so the rows come last.

    Raises DatasetError if another command made `target` meanwhile.
    """
    about = target.with_name(target.name + ABOUT)
    with _alone_in(target.parent):
        if target.exists():
            raise DatasetError(f"another command created {target} in the meantime: run this one again")
        shutil.rmtree(about, ignore_errors=True)  # of a command that was killed between its two renames
        scratch.about.rename(about)
        scratch.rows.rename(target)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other command publishes in this folder; a killed command releases the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Writes `manifest` as indented JSON; numbers that are not finite are refused."""
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
