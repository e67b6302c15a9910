"""The Arrow Flight server: named reads and users' SQL, each from a snapshot that holds all acknowledged before it.

A ticket is JSON, see trainspan_schemas/store.py. The answer's schema metadata has `watermark`, the last `seq` that the
rows can come from, and `behind`: "true" where the wait for the loader was over before all was loaded.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa
from pyarrow import flight

from trainspan_collector.access import Access, DeniedError, Right
from trainspan_collector.database import Database
from trainspan_collector.failures import first_line, lacks_memory
from trainspan_collector.fronts import Guard
from trainspan_collector.journal import Journal
from trainspan_collector.loader import Loader
from trainspan_collector.reads import named_read
from trainspan_collector.snapshots import Readers
from trainspan_collector.upkeep import Upkeep
from trainspan_schemas.errors import StoreError, UsageError

__all__ = ["FlightServer"]

log = logging.getLogger(__name__)

_DEFAULT_WAIT_MS = 10_000
_MAX_WAIT_MS = 600_000
_READING = frozenset(
    {
        flight.FlightMethod.DO_GET,
        flight.FlightMethod.GET_FLIGHT_INFO,
        flight.FlightMethod.GET_SCHEMA,
        flight.FlightMethod.LIST_FLIGHTS,
        flight.FlightMethod.LIST_ACTIONS,
        flight.FlightMethod.HANDSHAKE,
    }
)


@dataclass(frozen=True, slots=True)
class Request:
    """A ticket: `sql` or `read` with `parameters`."""

    sql: str | None
    read: str
    parameters: dict[str, object]
    wait_s: float


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves on `host:port` from construction on; port 0 takes a free one (`.port`)."""

    def __init__(
        self,
        address: str,
        *,
        database: Database,
        journal: Journal,
        loader: Loader,
        readers: Readers,
        upkeep: Upkeep,
        guard: Guard,
    ) -> None:
        tls = guard.tls
        super().__init__(
            f"grpc+tls://{address}" if tls else f"grpc://{address}",
            tls_certificates=[(tls.certificate, tls.key)] if tls else None,
            middleware={} if guard.access.is_open else {"access": _TokenGuard(guard.access)},
        )
        self._database = database
        self._journal = journal
        self._loader = loader
        self._readers = readers
        self._upkeep = upkeep

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        try:
            request = _parse(ticket.ticket)
            behind = not self._loader.wait_for(self._journal.end(), request.wait_s)
            if self._loader.failure is not None:
                raise StoreError(f"the collector is stopping, loading failed: {first_line(self._loader.failure)}")
            batches = self._batches(request, behind)
            schema = next(batches)
        except (UsageError, StoreError) as error:
            raise flight.FlightServerError(first_line(error)) from error
        return flight.GeneratorStream(schema, batches)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        """Upkeep of the store (see upkeep.py): JSON in, one JSON object out."""
        try:
            body = action.body.to_pybytes()
            answer = self._upkeep.do(action.type, json.loads(body) if body else {})
        except (UsageError, StoreError, duckdb.Error, OSError, ValueError) as error:
            raise flight.FlightServerError(first_line(error)) from error
        yield flight.Result(json.dumps(answer).encode())

    def _batches(self, request: Request, behind: bool) -> Iterator[pa.Schema | pa.RecordBatch]:
        """First the schema, then the rows; the transaction lives as long as the generator."""
        with self._readers.snapshot(self._database) as snapshot, contextlib.ExitStack() as limits:
            try:
                if request.sql is None:
                    query = named_read(request.read, request.parameters)
                    reader = snapshot.query(query.sql, query.parameters)
                else:
                    limits.enter_context(self._readers.limited(snapshot))
                    reader = snapshot.user_query(request.sql)
                metadata = {"watermark": str(snapshot.watermark), "behind": "true" if behind else "false"}
                yield reader.schema.with_metadata(metadata)
                for batch in reader:
                    yield batch.replace_schema_metadata(metadata)
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                raise flight.FlightServerError(_explained(error)) from error


class _TokenGuard(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Asks every call for a token whose role may do it."""

    def __init__(self, access: Access) -> None:
        super().__init__()
        self._access = access

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str]]) -> None:
        right = Right.READ if info.method in _READING else Right.CHANGE
        try:
            self._access.authorize(right, next(iter(headers.get("authorization", ())), None))
        except DeniedError as error:
            kind = flight.FlightUnauthorizedError if error.is_known else flight.FlightUnauthenticatedError
            raise kind(str(error)) from error


def _parse(ticket: bytes) -> Request:
    try:
        fields = json.loads(ticket)
    except ValueError as error:
        raise UsageError('the ticket is no JSON: send {"read": …} or {"sql": …}') from error
    if not isinstance(fields, dict) or ("sql" in fields) == ("read" in fields):
        raise UsageError('the ticket needs exactly one of "read" and "sql"')
    if unknown := set(fields) - {"sql", "read", "parameters", "wait_ms"}:
        raise UsageError(f'the ticket has an unknown member {min(unknown)!r}; there are "parameters" and "wait_ms"')
    text = fields.get("sql", fields.get("read"))
    parameters, wait_ms = fields.get("parameters") or {}, fields.get("wait_ms", _DEFAULT_WAIT_MS)
    if not isinstance(text, str) or not isinstance(parameters, dict):
        raise UsageError('"sql" and "read" are strings, "parameters" is an object')
    if isinstance(wait_ms, bool) or not isinstance(wait_ms, (int, float)) or not 0 <= wait_ms <= _MAX_WAIT_MS:
        raise UsageError(f"wait_ms = {wait_ms!r} is not between 0 and {_MAX_WAIT_MS}")
    return Request(fields.get("sql"), fields.get("read", ""), parameters, wait_ms / 1000)


def _explained(error: Exception) -> str:
    line = first_line(error)
    return f"{line}: raise duckdb_memory_bytes in [collector]" if lacks_memory(error) else line
