"""Requests that only want their own prompt back."""

import json

__all__ = ["only_echoes"]


def only_echoes(path: str, body: bytes) -> bool:
    """Whether a request to `path` gets no sampled token: vLLM samples one for `max_tokens: 0`, and keeps it to itself.

    vLLM accepts that only with `echo`, and numbers also as text.
    """
    if path != "/v1/completions":
        return False
    try:
        request = json.loads(body)
        return isinstance(request, dict) and float(request["max_tokens"]) == 0
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False
