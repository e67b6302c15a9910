"""Reads the whole body of a request, within a size and time limit, before the request counts as in flight."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from trainspan_serving.http.asgi import Message, Receive, Scope

__all__ = ["BodyError", "ClientGoneError", "read_body", "replayed"]


class BodyError(Exception):
    """A body that is too long (413) or too slow (408)."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ClientGoneError(Exception):
    """The client closed the connection before its body was complete: there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """Reads the whole body. A Content-Length over the limit is refused before anything is read or 100 Continue is sent.

    Raises BodyError or ClientGoneError.
    """
    too_long = BodyError(413, f"the body is longer than {max_bytes} bytes")
    if _announced(scope) > max_bytes:
        raise too_long
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk = bytes(message.get("body", b""))
                size += len(chunk)
                if size > max_bytes:
                    raise too_long
                if chunk:
                    chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise BodyError(408, f"the body did not arrive within {timeout_s:g} s; got {size} bytes of it") from None


def replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that yields the body first, then what remains: the end of the connection."""
    left = [body]

    async def receive_again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return receive_again


def _announced(scope: MutableMapping[str, Any]) -> float:
    """Returns the Content-Length; 0 if there is none (a chunked body)."""
    text = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return float(text) if text.isdigit() else 0.0
