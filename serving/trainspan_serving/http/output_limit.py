"""Limits the tokens that a request asks for to the context: harnesses ask for as many as their vendor's models may write.

vLLM lowers the number further, to what the prompt leaves, but refuses one that is larger than the whole context.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["limited"]

_FIELDS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def limited(body: bytes, request: Mapping[str, Any], max_model_len: int) -> tuple[bytes, int | None]:
    """Returns the body with at most `max_model_len` output tokens, and how many `request`, which it holds, asked for; None if it
    states no number."""
    asked = {name: value for name in _FIELDS if type(value := request.get(name)) is int}
    if not asked:
        return body, None
    if max(asked.values()) > max_model_len:
        fitting = {name: min(value, max_model_len) for name, value in asked.items()}
        body = json.dumps({**json.loads(body), **fitting}).encode()
    return body, max(asked.values())
