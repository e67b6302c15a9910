"""The Arrow Flight server: named reads and users' SQL, each from a snapshot with everything acknowledged before it.

A ticket is JSON, see trainspan_schemas/store/access.py. The answer's schema metadata has `watermark`, the last `seq` that the
rows can come from, and `behind`: "true" if the wait for the loader timed out before everything was loaded.

It is a gRPC server like the OTLP one, not Arrow's own, which has no limits on connections and tickets and cannot end a call.
It outlives the store: while none is open, readers wait.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import duckdb
import grpc
import pyarrow as pa

from trainspan_collector.journal.journal import Journal
from trainspan_collector.load.loader import Loader
from trainspan_collector.maintenance.actions import Maintenance
from trainspan_collector.network.access import Right, Role
from trainspan_collector.network.credentials import AccessControl
from trainspan_collector.network.flight_messages import SERVICE, Action, Result, Ticket, flight_data, parts_of
from trainspan_collector.network.grpc_limits import CallGuard, RoleHandlers, abort, server_options
from trainspan_collector.network.grpc_timeout import MessageTimeout
from trainspan_collector.query.named_reads import named_read
from trainspan_collector.query.places import RowPlaces
from trainspan_collector.query.tickets import ReadTicket, parse_ticket
from trainspan_collector.store.database import Database
from trainspan_collector.store.duckdb_errors import first_line, lacks_memory
from trainspan_collector.store.snapshots import Readers
from trainspan_schemas.errors import StoreError, UsageError

__all__ = ["FlightServer", "ReadableStore"]

log = logging.getLogger(__name__)

_MAX_TICKET_BYTES: Final = 64 * 1024 * 1024  # a read may name many rollouts
_WORKERS: Final = {Role.READER: 32, Role.RUNNER: 32}
"""Each read holds one until its last row is taken. Roles share none."""
_ACTION_WORKERS: Final = 8
_CROWD: Final = 24
_CROWD_S: Final = 10.0
"""If `_CROWD` readers of a role take no rows, those that have taken none for this long are ended: they would block others."""
_MESSAGE_S: Final = 20.0
_STALL_S: Final = 600.0
_END_S: Final = 20.0
_IO_ERROR: Final = "5"  # an Arrow code: Arrow's clients then show the message unchanged
_RIGHTS: Final = {"DoAction": Right.CHANGE, "DoGet": Right.READ}


@dataclass(frozen=True, slots=True)
class ReadableStore:
    """The parts of an open store that readers need."""

    database: Database
    journal: Journal
    loader: Loader
    readers: Readers
    maintenance: Maintenance


class FlightServer:
    """Binds `address` at once (`.port`), serves after `start`. Raises RuntimeError if the port is in use."""

    def __init__(self, address: str, guard: AccessControl) -> None:
        self._store: ReadableStore | None = None
        self._is_stopped = False
        self._changed = threading.Condition()
        self._ticket_timeouts = {role: MessageTimeout(_MESSAGE_S, crowd=_CROWD) for role in _WORKERS}
        self._timeouts = {role: MessageTimeout(_STALL_S, crowd=_CROWD, crowd_s=_CROWD_S) for role in _WORKERS}
        self._action_timeout = MessageTimeout(_MESSAGE_S, crowd=_ACTION_WORKERS // 2)
        reads = RoleHandlers(
            guard.access, Right.READ, _WORKERS, {f"/{SERVICE}/DoGet": self._do_get},
            name="flight", make=grpc.stream_stream_rpc_method_handler,
        )  # fmt: skip
        actions = {"DoAction": grpc.stream_stream_rpc_method_handler(self._do_action)}
        self._server = grpc.server(
            ThreadPoolExecutor(_ACTION_WORKERS, thread_name_prefix="maintenance"),
            handlers=[reads, grpc.method_handlers_generic_handler(SERVICE, actions)],
            interceptors=[
                CallGuard(
                    guard.access,
                    lambda method: _RIGHTS.get(method.rpartition("/")[2], Right.CHANGE),
                    transport="flight",
                )
            ],
            options=server_options(_MAX_TICKET_BYTES),
        )
        self.port: int = guard.add_port(self._server, address)

    def start(self) -> None:
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running ones `grace_s` to finish, then ends them."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._server.stop(grace_s).wait()
        for timeout in (*self._ticket_timeouts.values(), *self._timeouts.values(), self._action_timeout):
            timeout.close()

    def open_to(self, store: ReadableStore) -> None:
        with self._changed:
            self._store = store
            self._changed.notify_all()

    def shut(self, grace_s: float) -> None:
        """From now on, new readers wait for a store; running ones have `grace_s` to finish, then they are ended."""
        with self._changed:
            store, self._store = self._store, None
        if store is not None:
            try:
                store.readers.end(grace_s, _END_S)
            except StoreError as error:
                log.warning("%s", error)

    def _do_get(self, role: Role, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with _refusals(context):
            request = parse_ticket(Ticket.FromString(_message(messages, context, self._ticket_timeouts[role])).ticket)
            store = self._reading(request.wait_s)
            behind = not store.loader.wait_for(store.journal.end(), request.wait_s)
            if store.loader.failure is not None:
                raise StoreError(f"the collector is stopping, loading failed: {first_line(store.loader.failure)}")
            with contextlib.closing(_answer(store, request, "true" if behind else "false", context)) as answer:
                for message in answer:
                    with self._timeouts[role].waiting(context):
                        yield message

    def _do_action(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Maintenance of the store (see maintenance/actions.py): JSON in, one JSON object out."""
        with _refusals(context):
            action = Action.FromString(_message(messages, context, self._action_timeout))
            answer = self._reading(0.0).maintenance.do(action.type, json.loads(action.body) if action.body else {})
            yield Result(body=json.dumps(answer).encode()).SerializeToString()

    def _reading(self, wait_s: float) -> ReadableStore:
        with self._changed:
            self._changed.wait_for(lambda: self._store is not None or self._is_stopped, wait_s)
            if self._store is None:
                raise StoreError("the store is being opened, or the collector is stopping: try again")
            return self._store


def _answer(
    store: ReadableStore, request: ReadTicket, behind: str, context: grpc.ServicerContext
) -> Generator[bytes, None, None]:
    """The messages of the answer, the schema first; the snapshot lives as long as the generator."""
    if request.sql is not None:
        with store.readers.query(store.database, request.sql, behind, context.cancel) as process:
            yield from process.answer()
        return
    with store.readers.snapshot(store.database, context.cancel) as snapshot:
        reader = None
        try:
            query = named_read(request.read, request.parameters, RowPlaces(snapshot.cursor))
            reader = snapshot.query(query.sql, query.parameters)
            metadata = {"watermark": str(snapshot.watermark), "behind": behind}
            yield flight_data(pa.ipc.read_message(reader.schema.with_metadata(metadata).serialize()))
            for part in parts_of(reader):
                yield flight_data(pa.ipc.read_message(part.serialize()))
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise StoreError(_explained(error)) from error.with_traceback(None)  # its frames hold the reader
        finally:
            del reader  # it holds the database open; the thread that waits for the last reader closes it


def _message(messages: Iterator[bytes], context: grpc.ServicerContext, timeout: MessageTimeout) -> bytes:
    """The call's one message."""
    with timeout.waiting(context):
        return next(messages, b"")


@contextlib.contextmanager
def _refusals(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends the call with the error that occurred."""
    try:
        yield
    except (UsageError, StoreError, duckdb.Error, OSError, ValueError) as error:
        line = first_line(error)
        context.set_trailing_metadata((("x-arrow-status", _IO_ERROR), ("x-arrow-status-message-bin", line.encode())))
        abort(context, grpc.StatusCode.UNKNOWN, line)


def _explained(error: Exception) -> str:
    line = first_line(error)
    return f"{line}: raise duckdb_memory_bytes in [collector]" if lacks_memory(error) else line
