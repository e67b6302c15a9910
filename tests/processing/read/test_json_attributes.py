"""Attribute JSON is read by pattern, and must match a parser's result."""

import json
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from trainspan_processing.read.json_attributes import boolean, has_key, number, text, with_facts

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


_WRONG = st.lists(_TEXT, max_size=3) | st.just({"bytes": "AAA="}) | st.none()
_FACTS = st.dictionaries(st.sampled_from(["a.b", "a.b.c", "ab"]), _VALUE | st.sampled_from(["1e3", "TRUE"]) | _WRONG)


@given(st.lists(st.none() | _FACTS, max_size=4))
def test_facts_of_calls_are_read_as_their_type_or_are_absent(rows: list[dict[str, Any] | None]) -> None:
    facts = [None if row is None else json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    batch = pl.DataFrame({"call_facts": facts}, schema={"call_facts": pl.String})
    read = with_facts(batch, numbers={"number": "a.b"}, booleans={"flag": "a.b.c"}, texts={"word": "ab"})
    assert read["call_facts"].to_list() == facts
    for row, (number_, flag, word) in zip(rows, read.select("number", "flag", "word").iter_rows(), strict=True):
        said = row or {}
        assert word == (said["ab"] if isinstance(said.get("ab"), str) and said["ab"] else None)
        assert flag is {"true": True, "false": False}.get(str(said.get("a.b.c")).lower())
        assert number_ == _number(said.get("a.b"))


def _number(value: Any) -> float | None:
    """The reference: numbers, and text that Python parses as a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number_ = float(value)
    except ValueError:
        return None
    return number_
