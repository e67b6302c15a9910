"""Reads the body of a request within limits of size, time and memory."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from trainspan_collector.otlp.gunzip import too_many_bytes
from trainspan_collector.receive.http_answers import RefusedError, overloaded
from trainspan_collector.receive.memory_budget import Share
from trainspan_collector.runtime.metrics import RefusalReason

__all__ = ["GoneError", "Receive", "read_body"]

_BODY_S: Final = 60.0
_ROOM_CHECK_S: Final = 0.02

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class GoneError(Exception):
    """The client disconnected before its request was complete."""


async def read_body(headers: Mapping[str, str], receive: Receive, share: Share, limit: int) -> bytes:
    """The body as it was sent; refused as soon as it is known to be too large, has no room, or takes too long."""
    stated = headers.get("content-length", "0")
    if stated.isdigit() and int(stated) > limit:
        raise RefusedError(413, str(too_many_bytes(limit, "as sent")), RefusalReason.TOO_LARGE)
    parts: list[bytes] = []
    n_bytes = 0
    try:
        async with asyncio.timeout(_BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise GoneError
                part = message.get("body", b"")
                n_bytes += len(part)
                if n_bytes > limit:
                    raise RefusedError(413, str(too_many_bytes(limit, "as sent")), RefusalReason.TOO_LARGE)
                if not share.try_to_grow(len(part)):
                    await _wait_to_grow(share, len(part))
                parts.append(part)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError as error:
        raise RefusedError(408, f"the body did not arrive within {_BODY_S:.0f} s", RefusalReason.TOO_SLOW) from error


async def _wait_to_grow(share: Share, n_bytes: int) -> None:
    """Waits for room without a thread. Raises RefusedError if there is none in time."""
    deadline = time.monotonic() + share.wait_s
    while not share.try_to_grow(n_bytes):
        if time.monotonic() >= deadline:
            raise overloaded(share.overload())
        await asyncio.sleep(_ROOM_CHECK_S)
