"""Typed lookups in attributes that anybody may have sent: a value of the wrong type counts as absent."""

import functools
import json
import logging
from collections.abc import Mapping

from trainspan_collector.otlp.json_encoding import encodable
from trainspan_collector.otlp.values import Json
from trainspan_schemas.telemetry import keys

__all__ = ["boolean", "first_text", "identity", "integer", "number", "text"]

log = logging.getLogger(__name__)
_MIN_INT32, _MAX_INT32 = -(2**31), 2**31 - 1


def text(attributes: Mapping[str, Json], key: str) -> str | None:
    """A non-empty string, or a number or boolean as text."""
    value = attributes.get(key)
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (int, float)) else None


def integer(attributes: Mapping[str, Json], key: str) -> int | None:
    """A 32-bit integer, also given as a whole double or as decimal text."""
    value = attributes.get(key)
    if type(value) is int:  # neither a boolean nor absent, and the most frequent
        return value if _MIN_INT32 <= value <= _MAX_INT32 else None
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not _MIN_INT32 <= value <= _MAX_INT32:
        return None
    return value


def identity(attributes: Mapping[str, Json]) -> tuple[str | None, int | None]:
    """Rollout id and attempt; neither, if the attempt is not a number from 0 that a column can hold: 0 is another attempt."""
    rollout_id, attempt = text(attributes, keys.ROLLOUT_ID), integer(attributes, keys.ATTEMPT)
    if keys.ATTEMPT in attributes and (attempt is None or attempt < 0):
        _log_attempt()
        return None, None
    return rollout_id, attempt


@functools.cache
def _log_attempt() -> None:
    log.warning(
        "malformed_identity: spans whose %s is not a whole number from 0 to %d belong to no rollout",
        keys.ATTEMPT,
        _MAX_INT32,
    )


def number(attributes: Mapping[str, Json], key: str) -> float | None:
    """A finite number: an int or double."""
    value = attributes.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def boolean(attributes: Mapping[str, Json], key: str) -> bool | None:
    value = attributes.get(key)
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def first_text(attributes: Mapping[str, Json], key: str) -> str | None:
    """The first string of an array, which may be JSON text, or a plain string."""
    value = attributes.get(key)
    if isinstance(value, str) and value.startswith("["):
        try:
            items = json.loads(value)
        except (ValueError, RecursionError):
            return value
        value = [encodable(item) for item in items[:1] if isinstance(item, str)]
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, str) and value else None
