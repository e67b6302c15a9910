"""Writes the files of a dataset: Parquet with the agreed columns and bytes that depend only on the rows; and the manifest."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trainspan_processing.dataset.files import Files
from trainspan_schemas.artifacts.dataset import COLUMN_MEANINGS, COLUMNS
from trainspan_schemas.artifacts.manifest import DatasetManifest
from trainspan_schemas.files.durable import sha256_of

__all__ = ["FileEntry", "write_manifest", "write_part"]

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
SCHEMA: Final = pa.schema(
    [pa.field(name, _TYPES[kind], metadata={"description": COLUMN_MEANINGS[name]}) for name, kind in COLUMNS.items()]
)
_LISTS: Final = [name for name, kind in COLUMNS.items() if kind.startswith("list")]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One Parquet file as listed in the manifest."""

    name: str
    sha256: str
    rows: int


def write_part(folder: Files, number: int, frames: Iterable[pl.DataFrame]) -> FileEntry:
    """Writes frames with COLUMNS to the part of this number, one row group per frame, and returns it once it is complete."""
    name, rows = f"part-{number:05d}.parquet", 0
    options: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": [name for name, kind in COLUMNS.items() if kind == "string"],
        "column_encoding": {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _LISTS},
        "write_statistics": [name for name in COLUMNS if name not in (*_LISTS, "constraint")],
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
    }
    with folder.filling(name) as path:
        with pq.ParquetWriter(path, SCHEMA, **options) as writer:
            for frame in frames:
                columns = [_column(frame[name], SCHEMA.field(name).type) for name in COLUMNS]
                table = pa.Table.from_arrays(columns, schema=SCHEMA)
                writer.write_table(table, row_group_size=max(1, table.num_rows))
                rows += table.num_rows
                del frame, columns, table  # before the next frame is made
        digest = sha256_of(path)
    return FileEntry(name, digest, rows)


def _column(values: pl.Series, kind: Any) -> Any:
    column = values.to_arrow()
    return column if column.type == kind else column.cast(kind)


def write_manifest(path: Path, manifest: DatasetManifest) -> None:
    """Writes `manifest` as indented JSON; numbers that are not finite are refused."""
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
