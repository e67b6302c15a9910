"""A whole JSON answer over ASGI."""

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

__all__ = ["answer_json", "one_line"]


async def answer_json(
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    status: int,
    body: object,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Sends `body` with `status`; `headers` come on top of type and length."""
    data = json.dumps(body).encode()
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": data})


def one_line(error: Exception) -> str:
    """The error as text for people, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())
