"""The ledgers of a folder of datasets in one file, `.ledgers`, so that a build does not read thousands.

The ledgers are the truth. The summary is used only if each file that it covers has the size and time of then, it is never
published, and it can be deleted.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Container, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

import polars as pl

from trainspan_processing.tables import Schema

__all__ = ["LedgerFile", "Summary", "digest_of", "read_summary", "write_summary"]

_FILE: Final = ".ledgers"
_COVERED: Final = "trainspan.ledgers"
"""Key of the file's metadata."""


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """A dataset's ledger as it was read."""

    name: str
    """Of the dataset's folder."""
    path: str
    """In the folder of datasets."""
    size: int
    mtime_ns: int
    sha256: str

    @classmethod
    def read(cls, name: str, path: Path) -> "tuple[LedgerFile, bytes]":
        """Returns the file and its bytes. Raises FileNotFoundError."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
        relative = f"{path.parent.name}/{path.name}"
        return cls(name, relative, len(data), status.st_mtime_ns, hashlib.sha256(data).hexdigest()), data

    def is_unchanged(self, out: Path) -> bool:
        try:
            status = os.stat(f"{out}/{self.path}")
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Summary:
    """What some ledgers state together."""

    rows: pl.DataFrame
    files: tuple[LedgerFile, ...] = ()


def read_summary(out: Path, schema: Schema, datasets: Container[str]) -> Summary:
    """The summary in `out` of the ledgers of some of these `datasets`; empty if there is none that holds."""
    file, nothing = out / _FILE, Summary(pl.DataFrame(schema=schema))
    try:
        covered = [LedgerFile(*entry) for entry in json.loads(pl.read_parquet_metadata(file)[_COVERED])]
        if not all(ledger.name in datasets and ledger.is_unchanged(out) for ledger in covered):
            return nothing
        rows = pl.read_parquet(file)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        pl.exceptions.PolarsError,
    ):  # none, cut off, or of another version
        return nothing
    return Summary(rows, tuple(covered)) if rows.schema == schema else nothing


def write_summary(out: Path, summary: Summary) -> None:
    """Replaces the summary; without permission or room there is none."""
    covered = [astuple(ledger) for ledger in summary.files]
    temporary = out / f"{_FILE}.{uuid.uuid4().hex}"
    with contextlib.suppress(OSError, pl.exceptions.PolarsError):
        try:
            summary.rows.write_parquet(temporary, metadata={_COVERED: json.dumps(covered)})
            temporary.replace(out / _FILE)
        finally:
            temporary.unlink(missing_ok=True)


def digest_of(files: Sequence[LedgerFile]) -> str:
    """One hash of the names and contents of ledgers."""
    lines = "".join(f"{ledger.name} {ledger.sha256}\n" for ledger in sorted(files, key=lambda ledger: ledger.name))
    return hashlib.sha256(lines.encode()).hexdigest()
