"""Reads of the store for commands: one SELECT over Arrow Flight, as rows."""

import json
from collections.abc import Sequence

from trainspan_schemas.errors import StoreError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.store.access import open_store, server_message

__all__ = ["backlog", "counts", "rows"]


def rows(store: str, sql: str, wait_ms: int = 10_000) -> list[JsonObject]:
    """The result of `sql` over everything acknowledged before this call. Raises StoreError."""
    from pyarrow import ArrowException, flight

    ticket = flight.Ticket(json.dumps({"sql": sql, "wait_ms": wait_ms}).encode())
    with open_store(store) as endpoint:
        client = flight.connect(endpoint.location, **endpoint.connect_options)
        options = flight.FlightCallOptions(headers=endpoint.call_headers)
        try:
            result: list[JsonObject] = client.do_get(ticket, options).read_all().to_pylist()
        except ArrowException as error:
            raise StoreError(f"the store refused a query: {server_message(error).splitlines()[0]}") from error
        finally:
            client.close()
    return result


def counts(stores: Sequence[str], sql: str) -> dict[str, int]:
    """The sums over all stores of the columns of `sql`, which gives one row of counts. Raises StoreError."""
    counted = [rows(store, sql)[0] for store in stores]
    return {name: sum(int(row[name]) for row in counted) for name in counted[0]}


def backlog(store: str) -> tuple[int, float | None]:
    """Bytes of the journal that are acknowledged but not loaded, and the seconds that loading them will take.

    The seconds are None if nothing was loaded yet. Raises StoreError.
    """
    from pyarrow import ArrowException, flight

    with open_store(store) as endpoint:
        options = flight.FlightCallOptions(headers=endpoint.call_headers)
        with flight.connect(endpoint.location, **endpoint.connect_options) as client:
            try:
                [result] = client.do_action(flight.Action("backlog", b""), options)
            except ArrowException as error:
                raise StoreError(
                    f"the store does not report its backlog: {server_message(error).splitlines()[0]}"
                ) from error
    answer = json.loads(result.body.to_pybytes())
    return answer["journal_bytes_not_loaded"], answer["seconds"]
