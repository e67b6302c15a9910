"""Writes a dataset: Parquet with the agreed columns and bytes that depend only on the rows; published as a whole."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trainspan_schemas.artifacts.dataset import ABOUT, COLUMNS
from trainspan_schemas.errors import DatasetError

__all__ = ["DatasetWriter", "FileEntry", "Scratch", "publish", "scratch_folder", "write_manifest"]

ROWS_PER_FILE: Final = 262_144

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


@dataclass(slots=True)
class DatasetWriter:
    """Appends frames of rows, in their final order, to `part-*.parquet` of a folder; one row group per frame."""

    folder: Path
    files: list[FileEntry] = field(default_factory=list)
    rows: int = 0
    _writer: Any = None
    _rows_in_file: int = 0

    def append(self, frame: pl.DataFrame) -> None:
        """Appends `frame`, which has COLUMNS in order; its rows come after all rows appended before."""
        if self._writer is None:
            self._writer = self._open()
        table = pa.Table.from_arrays([_column(frame[name], SCHEMA.field(name).type) for name in COLUMNS], schema=SCHEMA)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.rows += table.num_rows
        self._rows_in_file += table.num_rows
        if self._rows_in_file >= ROWS_PER_FILE:
            self._close_file()

    def finish(self) -> list[FileEntry]:
        """Closes the last file; a dataset without rows has one file without rows."""
        if self._writer is None and not self.files:
            self._writer = self._open()
        self._close_file()
        return self.files

    @property
    def _name(self) -> str:
        return f"part-{len(self.files):05d}.parquet"

    def _open(self) -> Any:
        options: dict[str, Any] = {
            "compression": "zstd",
            "use_dictionary": [name for name, kind in COLUMNS.items() if kind == "string"],
            "column_encoding": {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _LISTS},
            "write_statistics": [name for name in COLUMNS if name not in (*_LISTS, "constraint")],
            "dictionary_pagesize_limit": _DICTIONARY_BYTES,
        }
        return pq.ParquetWriter(self.folder / self._name, SCHEMA, **options)

    def _close_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        with (self.folder / self._name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.files.append(FileEntry(self._name, digest, self._rows_in_file))
        self._writer, self._rows_in_file = None, 0


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
    def about(self) -> Path:
        """The folder of its manifest, ledger and reports."""
        return self.root / "about"


@contextmanager
def scratch_folder(target: Path) -> Iterator[Scratch]:
    """A hidden folder next to `target` to fill and `publish`; unpublished content is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Scratch(target.with_name(f".{target.name}.{os.getpid()}"))
    shutil.rmtree(scratch.root, ignore_errors=True)
    for folder in (scratch.root, scratch.rows, scratch.about):
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
