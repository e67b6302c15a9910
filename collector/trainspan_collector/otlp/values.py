"""OTLP values as JSON text that keeps types (the encoding of trainspan_schemas/store/views.py).

string, bool, int as in JSON; a double always with a point or exponent, NaN and infinities as {"double": "NaN"};
bytes {"bytes": base64}; arrays as arrays; key-value lists {"kvlist": [[key, value], …]}; an empty value is null.
"""

import math
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import orjson
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

__all__ = ["Attributes", "Json", "read_attributes", "to_json_text", "to_plain"]

Json = str | bool | int | float | list["Json"] | dict[str, "Json"] | None


def to_json_text(value: Json) -> str:
    """JSON without spaces; NaN and infinities must already be encoded as above."""
    return orjson.dumps(value).decode()


def to_plain(value: AnyValue) -> Json:
    """`value` in the form that `to_json_text` writes."""
    kind = value.WhichOneof("value")
    return None if kind is None else _PLAIN[kind](value)


class Attributes:
    """Attributes of one span, event, log record or resource: for lookup and as text."""

    __slots__ = ("plain", "skipped", "text")

    def __init__(self, plain: Mapping[str, Json], text: str, skipped: Mapping[str, AnyValue]) -> None:
        self.plain = plain
        """Key → value; of a repeated key, the last. The text has both."""
        self.text = text
        self.skipped = skipped
        """The keys to skip that were present; they are not in `plain` or `text`."""


def read_attributes(pairs: Iterable[KeyValue], skip: Collection[str] = ()) -> Attributes:
    plain: dict[str, Json] = {}
    skipped: dict[str, AnyValue] = {}
    n_read = 0
    for pair in pairs:
        key, value = pair.key, pair.value
        if key in skip:
            skipped[key] = value
        else:
            n_read += 1
            plain[key] = value.string_value or to_plain(
                value
            )  # most are strings, and asking for the kind costs as much
    if len(plain) == n_read:
        return Attributes(plain, to_json_text(plain) if plain else "{}", skipped)
    members = [(pair.key, to_plain(pair.value)) for pair in pairs if pair.key not in skip]
    text = "{" + ",".join(f"{to_json_text(key)}:{to_json_text(value)}" for key, value in members) + "}"
    return Attributes(plain, text, skipped)


def _double(value: AnyValue) -> Json:
    number = value.double_value
    if math.isfinite(number):
        return number
    return {"double": "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"}


def _list(value: AnyValue) -> Json:
    return [to_plain(item) for item in value.array_value.values]


def _key_values(value: AnyValue) -> Json:
    return {"kvlist": [[pair.key, to_plain(pair.value)] for pair in value.kvlist_value.values]}


def _string_index(value: Any) -> Json:
    # A reference into the dictionary of the profiles signal, which no other signal may use.
    return {"string_index": value.string_value_strindex}


_PLAIN: dict[str, Callable[[AnyValue], Json]] = {
    "string_value": lambda value: value.string_value,
    "bool_value": lambda value: value.bool_value,
    "int_value": lambda value: value.int_value,
    "double_value": _double,
    "bytes_value": lambda value: {"bytes": b64encode(value.bytes_value).decode()},
    "array_value": _list,
    "kvlist_value": _key_values,
    "string_value_strindex": _string_index,
}
