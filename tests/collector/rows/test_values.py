"""OTLP values ↔ typed JSON text."""

import json
import math
from base64 import b64decode
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.support.collector.process import any_value, key_values
from trainspan_collector.otlp.values import read_attributes, to_json_text, to_plain

# Text that protobuf can carry: no lone surrogates.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)


def _back(value: Any) -> Any:
    """The value that was sent, decoded from the JSON text."""
    if isinstance(value, list):
        return [_back(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "bytes":
        return b64decode(content)
    if tag == "double":
        return float(content.replace("Infinity", "inf"))
    assert tag == "kvlist"
    return {key: _back(item) for key, item in content}


def _same(left: object, right: object) -> bool:
    """Equal and of equal types all the way down: 1, 1.0 and True differ."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


@given(values)
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    text = to_json_text(to_plain(any_value(value)))
    assert _same(_back(json.loads(text)), value)


def test_the_text_of_each_kind_is_as_documented() -> None:
    attributes = {
        "s": 'a"\x00\x1b😀',
        "b": True,
        "i": -(2**63),
        "d": 1.0,
        "bytes": b"\x00\xff",
        "list": [1, "x", [2.5]],
        "map": {"bytes": "no bytes"},
        "empty": None,
        "": "",
    }
    assert read_attributes(key_values(attributes)).text == (
        '{"s":"a\\"\\u0000\\u001b😀","b":true,"i":-9223372036854775808,"d":1.0,"bytes":{"bytes":"AP8="},'
        '"list":[1,"x",[2.5]],"map":{"kvlist":[["bytes","no bytes"]]},"empty":null,"":""}'
    )


def test_doubles_that_json_lacks_are_tagged() -> None:
    text = to_json_text(to_plain(any_value([math.nan, math.inf, -math.inf])))
    assert text == '[{"double":"NaN"},{"double":"Infinity"},{"double":"-Infinity"}]'


def test_a_key_that_stands_twice_is_kept_twice() -> None:
    read = read_attributes([*key_values({"k": 1}), *key_values({"k": "two"})])
    assert read.text == '{"k":1,"k":"two"}'
    assert read.plain == {"k": "two"}


def test_every_kind_of_value_in_the_protocol_is_handled() -> None:
    for kind in AnyValue.DESCRIPTOR.oneofs_by_name["value"].fields:
        value = AnyValue()
        if kind.message_type is not None:
            getattr(value, kind.name).SetInParent()
        else:
            setattr(value, kind.name, kind.default_value)
        assert value.WhichOneof("value") == kind.name
        json.loads(to_json_text(to_plain(value)))
