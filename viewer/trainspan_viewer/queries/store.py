"""SELECTs on the store for pages: bounded in rows and bytes, over one connection that is kept while pages are viewed."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainspan_schemas.errors import StoreError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.store.access import open_store, server_message

__all__ = ["QueryRows", "StoreReader"]

_MOST_BYTES: Final = 8 * 1024 * 1024
_IDLE_S: Final = 30.0
"""After this time without a page, the connection is closed: a collector that was started only for readers then ends."""
_WAIT_MS: Final = 500
"""How long a read waits for the loader. A page shows what is loaded, and says so if that is not everything."""

Row = JsonObject
"""Column → value."""


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Rows of a SELECT."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    is_cut: bool
    """Whether there are more rows than were asked for or fit."""
    is_behind: bool
    """Whether the store has acknowledged spans that are not loaded yet."""

    def records(self) -> list[Row]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class _LostError(StoreError):
    """The connection cannot be used any more."""


class StoreReader:
    """The stores at paths or addresses; safe for threads. Raises StoreError if one of them cannot be read."""

    def __init__(self, *stores: str) -> None:
        self.stores = stores
        self._connections = [_StoreConnection(store) for store in stores]

    def select(self, sql: str, most: int = 1000) -> QueryRows:
        """The first `most` rows of one SELECT on each store, one store after the other."""
        return self._joined([connection.get({"sql": sql}, most) for connection in self._connections], most)

    def read(self, name: str, columns: Sequence[str], most: int = 10_000, **parameters: object) -> QueryRows:
        """The first `most` rows of a named read, which examines only what its parameters name, as for `select`."""
        asked: dict[str, object] = {"read": name, "parameters": {**parameters, "columns": list(columns)}}
        return self._joined([connection.get(asked, most) for connection in self._connections], most)

    def hold(self) -> None:
        """Opens the connections unless they are open: a collector that was started only for readers then stays for a while."""
        for connection in self._connections:
            connection.hold()

    def close_if_idle(self) -> None:
        """Closes the connections that have not been used for a while."""
        for connection in self._connections:
            connection.close_if_idle()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _joined(self, results: Sequence[QueryRows], most: int) -> QueryRows:
        first = results[0]
        if len(results) == 1:
            return first
        if any(result.columns != first.columns for result in results):
            raise StoreError("the stores give different columns for this query")
        rows = [row for result in results for row in result.rows]
        return QueryRows(
            columns=first.columns,
            rows=rows[:most],
            is_cut=len(rows) > most or any(result.is_cut for result in results),
            is_behind=any(result.is_behind for result in results),
        )


class _StoreConnection:
    """A connection to one store, opened when it is needed."""

    def __init__(self, store: str) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._open: tuple[Any, Any, contextlib.ExitStack] | None = None
        self._users = 0
        self._used = 0.0

    def get(self, asked: dict[str, object], most: int) -> QueryRows:
        from pyarrow import ArrowException, flight

        ticket = flight.Ticket(json.dumps({**asked, "wait_ms": _WAIT_MS}).encode())
        with self._connection() as (client, options):
            try:
                return _taken(client.do_get(ticket, options), most)
            except (
                flight.FlightUnavailableError,
                flight.FlightUnauthenticatedError,
                flight.FlightTimedOutError,
            ) as error:
                raise _LostError(server_message(error).splitlines()[0]) from error
            except ArrowException as error:
                raise StoreError(server_message(error).splitlines()[0]) from error

    def hold(self) -> None:
        """Opens the connection unless it is open: a collector that was started only for readers then stays for a while."""
        with self._connection():
            pass

    def close_if_idle(self) -> None:
        """Closes the connection if it has not been used for a while."""
        with self._lock:
            if self._open and not self._users and time.monotonic() - self._used > _IDLE_S:
                self._shut()

    def close(self) -> None:
        with self._lock:
            self._shut()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[tuple[Any, Any]]:
        with self._lock:
            if self._open is None:
                self._open = self._connect()
            client, options, stack = self._open
            self._users += 1
        try:
            yield client, options
        except _LostError:
            with self._lock:
                if self._open and self._open[2] is stack and self._users == 1:
                    self._shut()  # the collector may have moved: the next read looks for it again
            raise
        finally:
            with self._lock:
                self._users -= 1
                self._used = time.monotonic()

    def _connect(self) -> tuple[Any, Any, contextlib.ExitStack]:
        from pyarrow import flight

        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(open_store(self.store))
            client = flight.connect(endpoint.location, **endpoint.connect_options)
            stack.callback(client.close)
            return client, flight.FlightCallOptions(headers=endpoint.call_headers, timeout=60.0), stack.pop_all()

    def _shut(self) -> None:
        if self._open is not None:
            self._open[2].close()
            self._open = None


def _taken(reader: Any, most: int) -> QueryRows:
    names = tuple(reader.schema.names)
    metadata = reader.schema.metadata or {}
    is_behind = metadata.get(b"behind") == b"true"
    rows: list[tuple[Any, ...]] = []
    size = 0
    for chunk in reader:
        size += chunk.data.nbytes
        rows.extend(zip(*(column.to_pylist() for column in chunk.data.columns), strict=True))
        if len(rows) > most or size > _MOST_BYTES:
            reader.cancel()
            return QueryRows(names, rows[:most], is_cut=True, is_behind=is_behind)
    return QueryRows(names, rows, is_cut=False, is_behind=is_behind)
