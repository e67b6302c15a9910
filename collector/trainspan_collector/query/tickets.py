"""Tickets of Flight reads: JSON (see trainspan_schemas/store/access.py), parsed and validated."""

import json
from dataclasses import dataclass
from typing import Final

from trainspan_schemas.errors import UsageError

__all__ = ["ReadTicket", "parse_ticket"]

_DEFAULT_WAIT_MS: Final = 10_000


_MAX_WAIT_MS: Final = 600_000


@dataclass(frozen=True, slots=True)
class ReadTicket:
    """A ticket: `sql` or `read` with `parameters`."""

    sql: str | None
    read: str
    parameters: dict[str, object]
    wait_s: float


def parse_ticket(ticket: bytes) -> ReadTicket:
    try:
        fields = json.loads(ticket)
    except ValueError as error:
        raise UsageError('the ticket is not JSON: send {"read": …} or {"sql": …}') from error
    if not isinstance(fields, dict) or ("sql" in fields) == ("read" in fields):
        raise UsageError('the ticket needs exactly one of "read" and "sql"')
    if unknown := set(fields) - {"sql", "read", "parameters", "wait_ms"}:
        raise UsageError(
            f'the ticket has an unknown member {min(unknown)!r}; members are "sql" or "read", "parameters" and "wait_ms"'
        )
    text = fields.get("sql", fields.get("read"))
    parameters, wait_ms = fields.get("parameters") or {}, fields.get("wait_ms", _DEFAULT_WAIT_MS)
    if not isinstance(text, str) or not isinstance(parameters, dict):
        raise UsageError('"sql" and "read" must be strings, "parameters" an object')
    if isinstance(wait_ms, bool) or not isinstance(wait_ms, (int, float)) or not 0 <= wait_ms <= _MAX_WAIT_MS:
        raise UsageError(f"wait_ms = {wait_ms!r} is not between 0 and {_MAX_WAIT_MS}")
    return ReadTicket(fields.get("sql"), fields.get("read", ""), parameters, wait_ms / 1000)
