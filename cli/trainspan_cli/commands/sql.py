"""`trainspan sql`: one SELECT against the store, as a table, JSON lines or CSV."""

import csv
import json
import math
import os
import sys
from base64 import b64encode
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainspan_cli.settings import ConfigOption, settings
from trainspan_schemas.endpoint import StoreEndpoint
from trainspan_schemas.errors import StoreError, UsageError
from trainspan_schemas.home import store_path
from trainspan_schemas.store import open_store

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["sql"]

_FORMATS = ("table", "json", "csv")
_TABLE_ROWS = 100
_FILE_WIDTH = 10_000  # nothing is wrapped in a file or pipe


def sql(
    query: Annotated[str, typer.Argument(help="One SELECT; the views are spans, logs, calls, evaluations, rollouts.")],
    store: Annotated[
        str | None, typer.Option(help="Path of the store or grpc://HOST:PORT [default: .trainspan/spans.duckdb].")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="table, json (one object a line) or csv.")] = "table",
    max_rows: Annotated[
        int | None, typer.Option(min=0, help="Rows to print, 0 for all [default: 100 as a table, else all].")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Query the store with SQL; what was acknowledged before is seen.

    Example: trainspan sql "SELECT rollout_id, status, reward FROM rollouts ORDER BY start_ns"
    """
    if format_ not in _FORMATS:
        raise UsageError(f"--format {format_!r} is none of {', '.join(_FORMATS)}")
    limit = max_rows if max_rows is not None else _TABLE_ROWS if format_ == "table" else 0
    with open_store(store or str(store_path(settings(config).collector.store))) as endpoint:
        names, rows = _select(endpoint, query)
        try:
            {"table": _print_table, "json": _print_json, "csv": _print_csv}[format_](names, rows, limit or None)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _select(endpoint: StoreEndpoint, query: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Column names and rows, streamed. Raises StoreError with the server's one line."""
    from pyarrow import flight

    client = flight.connect(endpoint.location, **endpoint.connect_options)
    options = flight.FlightCallOptions(headers=endpoint.call_headers)
    try:
        reader = client.do_get(flight.Ticket(json.dumps({"sql": query}).encode()), options)
        schema: pa.Schema = reader.schema
    except flight.FlightUnavailableError as error:
        raise StoreError(f"no collector answers at {endpoint.location}") from error
    except flight.FlightError as error:
        raise StoreError(_server_message(error)) from error
    if (schema.metadata or {}).get(b"behind") == b"true":
        print("trainspan: the newest spans are not loaded yet, the answer lacks them", file=sys.stderr)
    return _distinct(schema.names), _rows(reader)


def _rows(reader: Any) -> Iterator[tuple[Any, ...]]:
    from pyarrow import flight

    try:
        for chunk in reader:
            yield from zip(*(column.to_pylist() for column in chunk.data.columns), strict=True)
    except flight.FlightError as error:
        raise StoreError(_server_message(error)) from error


def _distinct(names: list[str]) -> list[str]:
    """Names that differ: a second `a` becomes `a_1`."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        n_before = seen.get(name, 0)
        seen[name] = n_before + 1
        result.append(f"{name}_{n_before}" if n_before else name)
    return result


def _server_message(error: Exception) -> str:
    return str(error).partition(". Detail:")[0].partition(" gRPC client debug context")[0]


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
    """A value as one text; NULL as such, nested values as JSON."""
    if value is None:
        return "NULL"
    return value if isinstance(value, str) else json.dumps(_typed(value), ensure_ascii=False).strip('"')


def _visible(text: str) -> str:
    """Text that cannot move the cursor or hide: control and format characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _exact(value: Decimal) -> float | str:
    """A decimal as a JSON number where that is the same number."""
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _typed(value: Any) -> Any:
    """A value as JSON has it: bytes as {"bytes": base64}, numbers that JSON lacks and other types as text."""
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
