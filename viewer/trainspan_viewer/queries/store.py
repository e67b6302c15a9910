"""SELECTs on the store for pages: bounded in rows and bytes, over one connection that is kept while pages are viewed."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.access import open_store

__all__ = ["QueryRows", "StoreReader"]

_MOST_BYTES: Final = 8 * 1024 * 1024
_IDLE_S: Final = 30.0
"""After this time without a page, the connection is closed: a collector that was started only for readers then ends."""
_NEVER: Final = 2**62
"""A `seq` that no row has."""
_WAIT_MS: Final = 500
"""How long a read waits for the loader. A page shows what is loaded, and says so if that is not everything."""


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Rows of a SELECT."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    is_cut: bool
    """Whether there are more rows than were asked for or fit."""
    is_behind: bool
    """Whether the store has acknowledged spans that are not loaded yet."""
    watermark: int = 0
    """The `seq` of the newest row that was loaded."""

    def records(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class _LostError(StoreError):
    """The connection cannot be used any more."""


class StoreReader:
    """The store at a path or address; safe for threads. Raises StoreError if it cannot be read."""

    def __init__(self, store: str) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._open: tuple[Any, Any, contextlib.ExitStack] | None = None
        self._users = 0
        self._used = 0.0

    def select(self, sql: str, most: int = 1000) -> QueryRows:
        """The first `most` rows of one SELECT."""
        return self._get({"sql": sql}, most)

    def read(self, name: str, columns: Sequence[str], most: int = 10_000, **parameters: object) -> QueryRows:
        """The first `most` rows of a named read, which examines only what its parameters name."""
        return self._get({"read": name, "parameters": {**parameters, "columns": list(columns)}}, most)

    def last_seq(self) -> int:
        """The `seq` of the newest row."""
        return self.read("rollouts", ["rollout_id"], since_seq=_NEVER).watermark

    def _get(self, asked: dict[str, object], most: int) -> QueryRows:
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
                raise _LostError(_message(error)) from error
            except ArrowException as error:
                raise StoreError(_message(error)) from error

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
    names = _distinct(reader.schema.names)
    metadata = reader.schema.metadata or {}
    state: dict[str, Any] = {
        "is_behind": metadata.get(b"behind") == b"true",
        "watermark": int(metadata.get(b"watermark", b"0")),
    }
    rows: list[tuple[Any, ...]] = []
    size = 0
    for chunk in reader:
        size += chunk.data.nbytes
        columns = zip(names, chunk.data.columns, strict=True)
        rows.extend(zip(*(_values(name, column) for name, column in columns), strict=True))
        if len(rows) > most or size > _MOST_BYTES:
            reader.cancel()
            return QueryRows(names, rows[:most], is_cut=True, **state)
    return QueryRows(names, rows, is_cut=False, **state)


def _values(name: str, column: Any) -> list[Any]:
    """Raises StoreError for a value that Python's types lack, such as an infinite time."""
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError) as error:
        raise StoreError(f"column {name} has a value that cannot be shown ({error}): cast it to VARCHAR") from error
    return values


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Makes names unique: a second `a` becomes `a_1`."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        before = seen.get(name, 0)
        seen[name] = before + 1
        result.append(f"{name}_{before}" if before else name)
    return tuple(result)


def _message(error: Exception) -> str:
    """The first line of the server's message."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition(". Detail:")[0].partition(". gRPC client debug context:")[0]
