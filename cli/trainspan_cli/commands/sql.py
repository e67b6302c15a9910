"""`trainspan sql`: one SELECT against the store, as a table, JSON lines or CSV."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainspan_cli.settings import ConfigOption, StoresOption, settings
from trainspan_cli.views.query_result import PRINTERS
from trainspan_loop.addresses import stores_of
from trainspan_schemas.errors import StoreError, UsageError
from trainspan_schemas.store.access import open_store, server_message
from trainspan_schemas.store.endpoint import StoreEndpoint

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["sql"]

_TABLE_ROWS = 100


def sql(
    query: Annotated[str, typer.Argument(help="One SELECT; the views are spans, logs, calls, evaluations, rollouts.")],
    store: StoresOption = None,
    format_: Annotated[str, typer.Option("--format", help="table, json (one object per line) or csv.")] = "table",
    max_rows: Annotated[
        int | None, typer.Option(min=0, help="Rows to print, 0 for all [default: 100 as a table, else all].")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Query the store with SQL; the result includes everything acknowledged before.

    Several stores are queried one after the other, and their rows have a first column store: sums are then per store.

    Example: trainspan sql "SELECT rollout_id, status, reward FROM rollouts ORDER BY start_ns"
    """
    if format_ not in PRINTERS:
        raise UsageError(f"--format {format_!r} is not one of {', '.join(PRINTERS)}")
    limit = max_rows if max_rows is not None else _TABLE_ROWS if format_ == "table" else 0
    stores = stores_of(settings(config), store)
    with contextlib.ExitStack() as opened:
        endpoints = {name: opened.enter_context(open_store(name)) for name in stores}
        names, rows = _of_all(endpoints, query)
        try:
            PRINTERS[format_](names, rows, limit or None)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of the output closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_all(endpoints: Mapping[str, StoreEndpoint], query: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Column names and rows of all stores, with the store's name first if there are several. Raises StoreError."""
    (names, first), *others = [_select(endpoint, query) for endpoint in endpoints.values()]
    if not others:
        return names, first
    if any(more != names for more, _ in others):
        raise StoreError("the stores give different columns for this query: ask one of them with --store")
    results = zip(endpoints, (first, *(rows for _, rows in others)), strict=True)
    return ["store", *names], ((name, *row) for name, rows in results for row in rows)


def _select(endpoint: StoreEndpoint, query: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Column names and rows, streamed. Raises StoreError with the server's message."""
    from pyarrow import flight

    client = flight.connect(endpoint.location, **endpoint.connect_options)
    options = flight.FlightCallOptions(headers=endpoint.call_headers)
    try:
        reader = client.do_get(flight.Ticket(json.dumps({"sql": query}).encode()), options)
        schema: pa.Schema = reader.schema
    except flight.FlightUnavailableError as error:
        raise StoreError(f"no collector answers at {endpoint.location}") from error
    except flight.FlightError as error:
        raise StoreError(server_message(error)) from error
    if (schema.metadata or {}).get(b"behind") == b"true":
        print("trainspan: the newest spans are not loaded yet and are missing from the result", file=sys.stderr)
    return _distinct(schema.names), _rows(reader)


def _rows(reader: Any) -> Iterator[tuple[Any, ...]]:
    from pyarrow import flight

    try:
        for chunk in reader:
            yield from zip(*(column.to_pylist() for column in chunk.data.columns), strict=True)
    except flight.FlightError as error:
        raise StoreError(server_message(error)) from error


def _distinct(names: list[str]) -> list[str]:
    """Makes names unique: a second `a` becomes `a_1`."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        n_before = seen.get(name, 0)
        seen[name] = n_before + 1
        result.append(f"{name}_{n_before}" if n_before else name)
    return result
