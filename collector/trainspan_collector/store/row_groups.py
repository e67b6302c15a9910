"""Row groups of limited size, so that the memory that rows take does not depend on how large they are.

DuckDB reads a table one row group at a time in each thread, here 2,048 rows, whatever their size: 2,048 spans of 4 MiB are
8 GiB. So the rows of a group have at most about GROUP_BYTES, unless a single row has more. The rest of such a group is filled
with empty rows, which have no `seq`, and the next rows begin another group. Empty rows take almost no space. They have the
time of the rows before them, so retention deletes them too: a group's space is freed once all of its rows are gone.

How DuckDB reads follows from its memory limit: the number of threads (`threads_within`), and whether rows of several groups
may be collected (`scan_settings`).
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainspan_collector.rows.tables import ROW_GROUP_ROWS
from trainspan_schemas.resources import available_cores

__all__ = [
    "BATCH_BYTES",
    "GROUP_BYTES",
    "RowGroups",
    "largest_row_bytes",
    "rows_at_once",
    "scan_settings",
    "set_scans",
    "threads_within",
]

GROUP_BYTES: Final = 16 * 2**20
BATCH_BYTES: Final = 2 * GROUP_BYTES
"""The size of one insert. A full group of small rows may have this size: splitting it would double the cost of loading."""

_THREAD_BYTES: Final = 64 * 2**20
"""Memory for each thread: a group of BATCH_BYTES as it is read, and what is made of it. Measured with 8 KiB spans: four
threads within 144 MiB could neither read all spans nor compact the store."""
_APART: Final = {
    "debug_enable_caching_operators": "false",
    "disabled_optimizers": "build_side_probe_side",
    "max_vacuum_tasks": "0",
}
"""Settings that keep groups apart. Joins and filters pass on the few rows of a group instead of collecting 2,048. Of two
joined tables, the right one is held in memory, so that a query can have texts and tokens on the left: DuckDB estimates the
number of rows, not their size. A checkpoint does not merge groups from which rows were deleted."""

_USUAL_BYTES: Final = BATCH_BYTES // ROW_GROUP_ROWS
"""A group of 2,048 rows of this size is within the limit, so the sizes of smaller rows need not be counted."""
_LARGEST: Final = "largest_row_bytes"
"""Key in `meta`: no row ever stored is larger. Absent if all have at most _USUAL_BYTES."""


def threads_within(memory_bytes: int) -> int:
    """The number of threads that a DuckDB with this memory limit may use: each holds a row group."""
    return max(1, min(available_cores(), memory_bytes // _THREAD_BYTES))


def scan_settings(largest_bytes: int, memory_bytes: int, n_threads: int) -> Mapping[str, str]:
    """The settings for a DuckDB whose store has rows of up to `largest_bytes`, 0 if all are of the usual size.

    As long as each thread could collect 2,048 of the largest rows, and a copy of them, they are DuckDB's own.
    """
    collected_bytes = 2 * ROW_GROUP_ROWS * max(largest_bytes, _USUAL_BYTES)
    return _APART if collected_bytes * n_threads > max(memory_bytes, _THREAD_BYTES) else {}


def set_scans(cursor: duckdb.DuckDBPyConnection, memory_bytes: int) -> None:
    """Applies `scan_settings` to this DuckDB, for all of its connections."""
    for name, value in scan_settings(largest_row_bytes(cursor), memory_bytes, threads_within(memory_bytes)).items():
        cursor.execute(f"SET GLOBAL {name} = '{value}'")


def largest_row_bytes(cursor: duckdb.DuckDBPyConnection) -> int:
    """An upper limit of the size of all rows; 0 if all are of the usual size."""
    rows = cursor.execute("SELECT value::BIGINT FROM meta WHERE key = ?", [_LARGEST]).fetchall()
    return rows[0][0] if rows else 0


def rows_at_once(largest_bytes: int) -> int:
    """How many rows a reader takes at a time: GROUP_BYTES of the largest; 2,048 if all are of the usual size."""
    return max(1, GROUP_BYTES // largest_bytes) if largest_bytes > _USUAL_BYTES else ROW_GROUP_ROWS


class RowGroups:
    """Inserts rows into a store's tables, and knows where the last row groups end."""

    def __init__(self, memory_bytes: int) -> None:
        """`memory_bytes` is DuckDB's memory limit."""
        self._memory_bytes = memory_bytes
        self._largest: int | None = None
        """An upper limit of the size of all rows; None if it must be looked up."""
        self._open: dict[str, tuple[int, int]] = {}
        """Rows and bytes of each table's last group, if sizes are counted. A group of unknown size takes no more rows."""

    def forget(self) -> None:
        """Call this after what was inserted is rolled back, or the file replaced."""
        self._largest = None
        self._open.clear()

    def insert(self, cursor: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
        """Inserts `rows` into `stored.{table}`. Raises duckdb.Error."""
        if not rows.num_rows:
            return
        sizes = _row_bytes(rows)
        is_counted = self._note(cursor, int(sizes.max())) > _USUAL_BYTES
        for part in self._parts(table, rows, sizes) if is_counted else [rows]:
            cursor.register("part", part)
            try:
                cursor.execute(f"INSERT INTO stored.{table} BY NAME SELECT * FROM part")
            finally:
                # If the transaction has failed, the next part replaces this one.
                with contextlib.suppress(duckdb.TransactionException):
                    cursor.unregister("part")

    def _note(self, cursor: duckdb.DuckDBPyConnection, n_bytes: int) -> int:
        """Records a row of `n_bytes`; the limit of the size of all rows, a power of two so that it rarely changes."""
        if self._largest is None:
            self._largest = largest_row_bytes(cursor)
        if n_bytes > max(self._largest, _USUAL_BYTES):
            self._largest = 1 << (n_bytes - 1).bit_length()
            cursor.execute("DELETE FROM meta WHERE key = ?", [_LARGEST])
            cursor.execute("INSERT INTO meta VALUES (?, ?)", [_LARGEST, str(self._largest)])
            set_scans(cursor, self._memory_bytes)
        return self._largest

    def _parts(self, table: str, rows: pa.Table, sizes: npt.NDArray[np.int64]) -> Iterator[pa.Table]:
        """The rows as they are if the last group stays within the limit; else in whole groups that hold no other rows."""
        n_rows, n_bytes = rows.num_rows, int(sizes.sum())
        open_rows, open_bytes = self._open.get(table, (0, GROUP_BYTES + 1))
        most = GROUP_BYTES
        if n_rows >= ROW_GROUP_ROWS:  # DuckDB begins a group
            open_rows, open_bytes, most = 0, 0, BATCH_BYTES
        if open_bytes + n_bytes <= most:
            total = open_rows + n_rows
            self._open[table] = total % ROW_GROUP_ROWS, open_bytes + n_bytes if total < ROW_GROUP_ROWS else n_bytes
            yield rows
            return
        self._open[table] = 0, 0
        start = 0
        for end in _ends(sizes):
            yield _filled_up(rows.slice(start, end - start))
            start = end


def _ends(sizes: npt.NDArray[np.int64]) -> Iterator[int]:
    """Where each group ends: it has at most GROUP_BYTES and 2,048 rows, and at least one row."""
    sums = np.cumsum(sizes)
    start, before = 0, 0
    while start < len(sizes):
        end = int(np.searchsorted(sums, before + GROUP_BYTES, side="right"))
        end = max(start + 1, min(end, start + ROW_GROUP_ROWS))
        yield end
        start, before = end, int(sums[end - 1])


def _filled_up(rows: pa.Table) -> pa.Table:
    n_empty = ROW_GROUP_ROWS - rows.num_rows
    if not n_empty:
        return rows
    columns: dict[str, Any] = {field.name: pa.nulls(n_empty, field.type) for field in rows.schema}
    columns["received_ns"] = pa.repeat(pc.call_function("max", [rows["received_ns"]]), n_empty)
    return pa.concat_tables([rows, pa.table(columns, rows.schema)]).combine_chunks()


def _row_bytes(rows: pa.Table) -> npt.NDArray[np.int64]:
    """The bytes of each row's texts and lists, shape (rows,)."""
    sizes = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            lengths, width = pc.call_function("binary_length", [column]), 1
        elif pa.types.is_list(kind):
            lengths, width = pc.call_function("list_value_length", [column]), kind.value_type.bit_width // 8
        else:
            continue
        sizes += width * pc.fill_null(lengths, 0).to_numpy().astype(np.int64)
    return sizes
