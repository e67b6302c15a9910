"""The types of ASGI, and complete JSON responses over it."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

__all__ = ["App", "Message", "Receive", "Scope", "Send", "answer_error", "answer_json"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_HEADERS: Final[Mapping[int, Sequence[tuple[bytes, bytes]]]] = {
    408: [(b"connection", b"close")],
    413: [(b"connection", b"close")],
    503: [(b"retry-after", b"1")],
}
"""Status → extra headers: an unread request body makes the connection unusable; a busy server is worth a retry."""

_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    503: "ServiceUnavailableError",
}


async def answer_json(
    send: Send,
    status: int,
    body: object,
) -> None:
    """Sends `body` with `status`."""
    data = json.dumps(body).encode()
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *_HEADERS.get(status, ())]})
    await send({"type": "http.response.body", "body": data})


async def answer_error(send: Send, status: int, message: str) -> None:
    """Sends an error in the format of OpenAI's API."""
    body = {"error": {"message": message, "type": _TYPES[status], "code": status}}
    await answer_json(send, status, body)
