"""Attributes of a span that readers query often, promoted to columns: searching the text is the costliest part of a read."""

import marshal
from collections.abc import Mapping
from typing import Final, TypeAlias

from trainspan_collector.otlp.values import Json, to_json_text
from trainspan_schemas.store.tables import SpanRow
from trainspan_schemas.store.views import CALL_FACTS
from trainspan_schemas.telemetry import keys

__all__ = ["PROMOTED", "read_promoted"]

_Text: TypeAlias = str | None


PROMOTED: Final = SpanRow._fields[SpanRow._fields.index("operation") : SpanRow._fields.index("attribute_keys") + 1]
"""Columns of `stored.spans`."""

_Promoted: TypeAlias = tuple[_Text, _Text, _Text, _Text, _Text, _Text, _Text, str]


def read_promoted(plain: Mapping[str, Json], *, is_call: bool) -> _Promoted:
    """The values of PROMOTED for a span's attributes."""
    redacted = plain.get(keys.REDACTED)
    return (
        _text(plain, keys.GEN_AI_OPERATION),
        _text(plain, keys.GEN_AI_REQUEST_MODEL),
        _text(plain, keys.GEN_AI_RESPONSE_ID),
        _text(plain, keys.STATE_KEY),
        _text(plain, keys.POLICY_VERSION_SPANS),
        to_json_text(redacted) if isinstance(redacted, list) else None,
        _call_facts(plain) if is_call else None,
        "\n" + "\n".join(plain) + "\n",
    )


_MAX_KNOWN: Final = 4096
_MAX_KNOWN_BYTES: Final = 1024  # a sender may write anything
_known: Final[dict[bytes, str]] = {}
"""Values as marshal writes them, which distinguishes 1, 1.0 and True → their text: writing it costs four times as much."""


def _call_facts(plain: Mapping[str, Json]) -> str | None:
    values = list(map(plain.get, CALL_FACTS))
    packed = marshal.dumps(values, 2)  # later versions write equal values in several ways
    text = _known.get(packed)
    if text is None:
        facts: dict[str, Json] = {
            key: value for key, value in zip(CALL_FACTS, values, strict=True) if value is not None
        }
        text = to_json_text(facts)
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        if len(packed) <= _MAX_KNOWN_BYTES:
            _known[packed] = text
    return text if len(text) > len("{}") else None


def _text(plain: Mapping[str, Json], key: str) -> str | None:
    value = plain.get(key)
    return value if isinstance(value, str) and value else None
