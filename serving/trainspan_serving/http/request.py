"""What the policy server changes in a request before vLLM gets it, and reads from it.

- Feedback names a call by its response, so no client chooses a response's id. vLLM takes it from the header `X-Request-Id`, else from
  the member `request_id` of the body; `/v1/responses` reads only the body.
- Harnesses ask for as many tokens as their vendor's models may write. vLLM lowers the number to what the prompt leaves, but refuses
  one that is larger than the whole context.

`request` is the JSON of the body, `{}` if the body has another type: every endpoint of vLLM that reads JSON refuses that.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any, Final

from trainspan_serving.http.asgi import Scope

__all__ = ["only_echoes", "rewritten"]

_HEADER: Final = b"x-request-id"
_READS_BODY: Final = "/v1/responses"
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def rewritten(scope: Scope, body: bytes, request: Mapping[str, Any], max_model_len: int) -> tuple[bytes, int | None]:
    """Sets a random `X-Request-Id` in `scope`. Returns the body without the client's choice and with at most `max_model_len` output
    tokens, byte for byte where nothing changes, and how many it asked for; None if it states no number."""
    headers = [pair for pair in scope["headers"] if pair[0] != _HEADER]
    scope["headers"] = [*headers, (_HEADER, secrets.token_hex(16).encode())]
    changed = dict(request)
    if scope["path"] == _READS_BODY and request.get("request_id") is not None:
        del changed["request_id"]
    asked = {name: value for name in _LIMITS if type(value := request.get(name)) is int}
    changed |= {name: max_model_len for name, value in asked.items() if value > max_model_len}
    return body if changed == request else json.dumps(changed).encode(), max(asked.values(), default=None)


def only_echoes(path: str, request: Mapping[str, Any]) -> bool:
    """Whether a request to `path` gets no sampled token: vLLM samples one for `max_tokens: 0`, and keeps it to itself.

    vLLM accepts that only with `echo`, and numbers also as text.
    """
    try:
        return path == "/v1/completions" and float(request["max_tokens"]) == 0
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
