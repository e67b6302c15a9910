"""Reads the whole body of a request, within a size and time limit, before the request counts as in flight, and checks its JSON.

vLLM answers some malformed bodies with 500, as if it had failed.
"""

import asyncio
import json
import math
import re
from collections.abc import MutableMapping
from typing import Any, Final

from trainspan_schemas.files.durable import JsonObject
from trainspan_serving.http.asgi import Message, Receive, Scope

__all__ = ["BodyError", "ClientGoneError", "check_json", "read_body", "replayed"]

MAX_DEPTH: Final = 100
"""Levels of lists and objects in each other; the deepest JSON schemas have about thirty."""
_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}|[eE][+-]?[0-9]{3}|NaN|Infinity")
"""Every number beyond the limits has one of these; looking at each number would take ten times as long."""
_SCHEMAS: Final = frozenset(
    {"tools", "functions", "messages", "input", "text", "response_format", "structured_outputs", "guided_json"}
)
"""Fields whose numbers are text to the model, or the bounds of a grammar."""
_HALF_CHARACTER: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyError(Exception):
    """A body that is too long (413), too slow (408) or malformed (400)."""

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


def check_json(scope: Scope, body: bytes) -> JsonObject:
    """Returns the JSON of a body; empty if it does not say that it is JSON.

    Raises BodyError (400) if it is none that vLLM can read: a JSON object in UTF-8, not deeper than MAX_DEPTH, with finite numbers that
    64 bits can hold and texts of whole characters.
    """
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"application/json")
    if not body.strip() or b"json" not in kind.lower():
        return {}  # no body, or another format
    try:
        text = body.decode()
        numbers: JsonObject = {}
        if _LONG_NUMBER.search(body):
            numbers = {"parse_int": _checked_int, "parse_float": _checked_float, "parse_constant": _checked_float}
        request: JsonObject = json.loads(text, **numbers)
        if not isinstance(request, dict):
            raise BodyError(400, f"the body must be a JSON object, not a {type(request).__name__}")
        if numbers:
            _check_integers(request)
        if _HALF_CHARACTER.search(body):
            json.dumps(request, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise BodyError(
            400, f"the body is not UTF-8: byte {error.start} is {body[error.start : error.start + 1]!r}"
        ) from None
    except UnicodeEncodeError as error:
        raise BodyError(
            400, f"the body has half a character (a lone surrogate): {error.object[error.start]!a}"
        ) from None
    except ValueError as error:
        raise BodyError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    _check_depth(request)
    return request


def _checked_int(text: str) -> int:
    if len(text) > 20:
        raise _too_large(text)
    return int(text)


def _check_integers(request: JsonObject) -> None:
    """Schemas may name the bounds of unsigned integers; what vLLM passes to its engine is signed."""
    rest: list[Any] = [value for name, value in request.items() if name not in _SCHEMAS]
    while rest:
        value = rest.pop()
        if isinstance(value, dict | list):
            rest.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _too_large(str(value))


def _too_large(text: str) -> BodyError:
    return BodyError(400, f"the integer {text[:30]} does not fit into 64 bits")


def _checked_float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise BodyError(400, f"the number {text[:30]} is not finite")
    return float(text)


def _check_depth(request: JsonObject) -> None:
    level: list[Any] = [request]
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> BodyError:
    return BodyError(400, f"the body has more than {MAX_DEPTH} levels of lists and objects in each other")


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
