"""Reads the store for commands: one SELECT over Arrow Flight, as rows."""

import json
from typing import Any

from trainspan_schemas.errors import StoreError
from trainspan_schemas.store import open_store

__all__ = ["rows"]


def rows(store: str, sql: str, wait_ms: int = 10_000) -> list[dict[str, Any]]:
    """The result of `sql` over everything acknowledged before this call. Raises StoreError."""
    from pyarrow import ArrowException, flight

    ticket = flight.Ticket(json.dumps({"sql": sql, "wait_ms": wait_ms}).encode())
    with open_store(store) as endpoint:
        client = flight.connect(endpoint.location, **endpoint.connect_options)
        options = flight.FlightCallOptions(headers=endpoint.call_headers)
        try:
            found: list[dict[str, Any]] = client.do_get(ticket, options).read_all().to_pylist()
        except ArrowException as error:
            raise StoreError(f"the store refused a query: {str(error).splitlines()[0]}") from error
        finally:
            client.close()
    return found
