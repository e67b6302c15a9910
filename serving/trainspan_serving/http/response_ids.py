"""Keeps clients from choosing the ids of responses: feedback names a call by its response, so that two must never share one.

vLLM takes a response's id from the header `X-Request-Id`, else from the member `request_id` of the body; `/v1/responses` reads
only the body.
"""

import json
import secrets
from typing import Final

from trainspan_serving.http.asgi import Scope

__all__ = ["with_own_response_id"]

_HEADER: Final = b"x-request-id"
_READS_BODY: Final = "/v1/responses"


def with_own_response_id(scope: Scope, body: bytes) -> bytes:
    """Sets a random `X-Request-Id` in `scope`; returns the body without the client's choice."""
    headers = [pair for pair in scope["headers"] if pair[0] != _HEADER]
    scope["headers"] = [*headers, (_HEADER, secrets.token_hex(16).encode())]
    if scope["path"] != _READS_BODY:
        return body
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body  # vLLM refuses it
    if not isinstance(request, dict) or request.pop("request_id", None) is None:
        return body
    return json.dumps(request).encode()
