"""Rows of the stored tables as Arrow tables with the same columns."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from trainspan_collector.rows.tokens import packed_lists
from trainspan_schemas.store.tables import Column, EvaluationRow, LogRow, SpanRow, columns

__all__ = ["ROW_GROUP_ROWS", "arrow_table"]

ROW_GROUP_ROWS: Final = 2048
"""An insert of whole row groups is compressed into the file directly: it bypasses the write-ahead log and the next checkpoint,
which halves its cost. Rows are wide, so groups are small: 2,048 call spans are 16 MiB."""

_ARROW_TYPES: Final[Mapping[str, pa.DataType]] = {
    "BIGINT": pa.int64(),
    "INTEGER": pa.int64(),  # the insert casts it, and refuses a number that does not fit
    "UBIGINT": pa.uint64(),
    "VARCHAR": pa.string(),
    "BOOLEAN": pa.bool_(),
    "BLOB": pa.binary(),
    "DOUBLE": pa.float64(),
    "INTEGER[]": pa.list_(pa.int32()),
    "FLOAT[]": pa.list_(pa.float32()),
}
"""DuckDB type → Arrow type."""


def arrow_table(rows: Sequence[SpanRow] | Sequence[LogRow] | Sequence[EvaluationRow]) -> pa.Table:
    """The rows, at least one, as a table. Raises ValueError, TypeError or ArithmeticError if a value does not fit its column."""
    values_by_column = zip(columns(type(rows[0])), zip(*rows, strict=True), strict=True)
    return pa.table({column.name: _array(column, values) for column, values in values_by_column})


def _array(column: Column, values: tuple[Any, ...]) -> pa.Array:
    arrow_type = _ARROW_TYPES[column.sql_type]
    if pa.types.is_list(arrow_type):
        return packed_lists(values, arrow_type.value_type)
    return pa.array(values, arrow_type)
