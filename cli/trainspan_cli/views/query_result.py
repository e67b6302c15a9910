"""Printers for the rows of a query: table, JSON lines or CSV."""

import csv
import json
import math
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final

__all__ = ["PRINTERS"]

_FILE_WIDTH: Final = 10_000  # files and pipes get no line wrapping


def _print_table(names: list[str], rows: Iterator[tuple[Any, ...]], limit: int | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in names:
        table.add_column(Text(_visible(name)))
    n_rows, cut = 0, False
    for row in rows:
        if n_rows == limit:
            cut = True
            break
        table.add_row(*(Text(_visible(_cell(value))) for value in row))
        n_rows += 1
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    Console(markup=False, highlight=False, emoji=False, width=width).print(table)
    if cut:
        print(f"trainspan: the first {n_rows} rows; --max-rows 0 prints all", file=sys.stderr)


def _print_json(names: list[str], rows: Iterator[tuple[Any, ...]], limit: int | None) -> None:
    for index, row in enumerate(rows):
        if index == limit:
            return
        print(json.dumps({name: _typed(value) for name, value in zip(names, row, strict=True)}))


def _print_csv(names: list[str], rows: Iterator[tuple[Any, ...]], limit: int | None) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    for index, row in enumerate(rows):
        if index == limit:
            return
        writer.writerow(["" if value is None else _cell(value) for value in row])


def _cell(value: object) -> str:
    """A value as text; None as `NULL`, nested values as JSON."""
    if value is None:
        return "NULL"
    return value if isinstance(value, str) else json.dumps(_typed(value), ensure_ascii=False).strip('"')


def _visible(text: str) -> str:
    """The text with control and format characters escaped, so that it cannot move the cursor or hide."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _exact(value: Decimal) -> float | str:
    """A decimal as a JSON number if that is exact, else as text."""
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _typed(value: Any) -> Any:
    """A value as JSON: bytes as {"bytes": base64}, numbers without a JSON form and other types as text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return {"bytes": b64encode(value).decode()}
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else _exact(value)
    if isinstance(value, (list, tuple)):
        return [_typed(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _typed(item) for key, item in value.items()}
    return str(value)


PRINTERS: Final[dict[str, Callable[[list[str], Iterator[tuple[Any, ...]], int | None], None]]] = {
    "table": _print_table,
    "json": _print_json,
    "csv": _print_csv,
}
"""Format → a function of column names, rows, and the maximum number of rows to print (None: all)."""
