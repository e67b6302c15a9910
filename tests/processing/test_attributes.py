"""Attribute JSON is read by pattern, and must say what a parser says."""

import json
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from trainspan_processing.attributes import boolean, has_key, number, text, with_common

_TEXT = st.text(max_size=12) | st.sampled_from(
    ['"a.b":1', '\\"a.b\\":"x"', '{"a.b":true}', "\\", "a.b", '":', ',"a.b":1']
)
_VALUE = _TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
_KEYS = st.sampled_from(["a.b", "a.b.c", "x.a.b", "ab", 'q"uote', 'x"a.b', 'x,"a.b'])


def _read(attributes: dict[str, Any], expression: pl.Expr) -> Any:
    encoded = json.dumps(attributes, ensure_ascii=False, separators=(",", ":"))
    return pl.DataFrame({"attributes": [encoded]}).select(expression).item()


@given(st.dictionaries(_KEYS, _VALUE | st.lists(_TEXT, max_size=3) | st.just({"bytes": "AAA="})))
def test_a_value_is_found_whatever_stands_around_it(attributes: dict[str, Any]) -> None:
    value = attributes.get("a.b")
    assert _read(attributes, text("a.b")) == (value if isinstance(value, str) and value else None)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        assert _read(attributes, number("a.b")) == float(value)
    if isinstance(value, bool):
        assert _read(attributes, boolean("a.b")) is value
    assert _read(attributes, has_key("a.b")) == any(key.startswith("a.b") for key in attributes)


def test_numbers_and_booleans_that_a_sender_wrote_as_text_are_read() -> None:
    assert _read({"a.b": "0.7"}, number("a.b")) == 0.7
    assert _read({"a.b": "True"}, boolean("a.b")) is True


def test_a_value_of_another_type_is_absent() -> None:
    assert _read({"a.b": [1, 2]}, number("a.b")) is None
    assert _read({"a.b": 5}, text("a.b")) is None
    assert _read({"a.b": "maybe"}, boolean("a.b")) is None
    assert _read({}, number("a.b")) is None


_NAMES = {"number": "a.b", "flag": "a.b.c", "word": "ab"}


@given(st.lists(st.dictionaries(_KEYS, _VALUE | st.lists(_TEXT, max_size=3) | st.just({"bytes": "AAA="})), max_size=4))
def test_what_repeats_is_read_as_each_value_alone_is(rows: list[dict[str, Any]]) -> None:
    encoded = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    batch = pl.DataFrame({"attributes": encoded}, schema={"attributes": pl.String})
    together = with_common(batch, _NAMES, numbers={"number"}, booleans={"flag"})
    alone = batch.select(number=number("a.b"), flag=boolean("a.b.c"), word=text("ab"))
    numbers = [row.get("a.b") for row in rows]
    for index, value in enumerate(numbers):
        if not isinstance(value, str):  # a text that holds a number is read more strictly by the parser
            assert together["number"][index] == alone["number"][index]
    assert together["flag"].to_list() == alone["flag"].to_list()
    assert together["word"].to_list() == alone["word"].to_list()
