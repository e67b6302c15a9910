"""Rewrites a store into a new, packed file: the same rows in the same order, except those to leave out.

The tables only grow at their end (`seq`), so most rows are copied from a snapshot while loading continues, and the rest in
the loader's thread before the new file replaces the old one.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa

from trainspan_collector.journal.segments import LoadProgress
from trainspan_collector.maintenance.selection import GONE, TraceSelection
from trainspan_collector.rows.tables import ROW_GROUP_ROWS
from trainspan_collector.store.database import Database
from trainspan_collector.store.insert import add_places
from trainspan_collector.store.row_groups import GROUP_BYTES, largest_row_bytes, rows_at_once

__all__ = ["Rewriting", "remove_leftovers"]

_TABLES = ("spans", "logs", "evaluations")
_REPLACED_SINCE = "SELECT seq, by_seq FROM stored.superseded WHERE seq <= $copied_to AND by_seq > $copied_to"
"""SQL of the rows that were copied before they were replaced."""


class Rewriting:
    """Copies into `<store>.rewritten`: call `copy` any number of times, then `finish`; must be closed."""

    def __init__(self, store: Path, selection: TraceSelection | None, *, memory_bytes: int) -> None:
        """`selection`: the rows to leave out."""
        remove_leftovers(store)
        self.path = _path(store)
        self._selection = selection
        self._target = Database(self.path, memory_bytes=memory_bytes)
        self._row_groups = self._target.row_groups()
        self._copied_to = 0
        self.rows: dict[str, int] = dict.fromkeys(_TABLES, 0)
        """Rows copied, by table."""

    def copy(self, source: duckdb.DuckDBPyConnection, up_to_seq: int) -> None:
        """Copies the rows up to `up_to_seq` that are not copied yet, except those replaced by richer ones."""
        target = self._target.cursor()
        for table in _TABLES:
            for rows in _row_groups(self._reader(source, table, up_to_seq)):
                self._row_groups.insert(target, table, rows)
                self.rows[table] += rows.num_rows
        since = source.sql(_REPLACED_SINCE, params={"copied_to": self._copied_to}).to_arrow_table()
        if since.num_rows:
            target.from_arrow(since).insert_into("stored.superseded")
        add_places(target, up_to_seq)
        self._copied_to = up_to_seq

    def finish(self, progress: LoadProgress) -> None:
        """Records how far the rows are loaded, and writes everything to disk."""
        position = progress.position
        self._target.cursor().execute(
            "UPDATE stored.progress SET segment = ?, byte_offset = ?, last_seq = ?",
            [position.segment, position.offset, progress.last_seq],
        )
        self._target.checkpoint()
        self._target.close()

    def close(self) -> None:
        """Removes the file, unless it has become the store."""
        self._target.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _reader(self, source: duckdb.DuckDBPyConnection, table: str, up_to_seq: int) -> pa.RecordBatchReader:
        parameters: dict[str, object] = {"after": self._copied_to, "up_to": up_to_seq}
        condition = "true"
        if self._selection is not None:
            self._selection.register(source)
            parameters |= self._selection.parameters
            condition = f"NOT {GONE}"
        query = (
            f"SELECT * FROM stored.{table} WHERE seq > $after AND seq <= $up_to AND {condition}"
            " AND seq NOT IN (SELECT seq FROM stored.superseded)"
        )
        return source.sql(query, params=parameters).to_arrow_reader(rows_at_once(largest_row_bytes(source)))


def remove_leftovers(store: Path) -> None:
    """Deletes the leftovers of a rewrite that a crash interrupted."""
    for name in (_path(store).name, f"{_path(store).name}.wal"):
        store.with_name(name).unlink(missing_ok=True)


def _path(store: Path) -> Path:
    return store.with_name(store.name + ".rewritten")


def _row_groups(reader: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """The rows in tables of exactly one row group, or of fewer rows of GROUP_BYTES; the last table has the rest."""
    batches: list[pa.RecordBatch] = []
    for batch in reader:
        if batches and sum(part.nbytes for part in batches) + batch.nbytes > GROUP_BYTES:
            yield pa.Table.from_batches(batches)
            batches = []
        batches.append(batch)
        if sum(part.num_rows for part in batches) >= ROW_GROUP_ROWS:
            table = pa.Table.from_batches(batches)
            while table.num_rows >= ROW_GROUP_ROWS:
                yield table.slice(0, ROW_GROUP_ROWS)
                table = table.slice(ROW_GROUP_ROWS)
            batches = table.to_batches()
    if any(part.num_rows for part in batches):
        yield pa.Table.from_batches(batches)
