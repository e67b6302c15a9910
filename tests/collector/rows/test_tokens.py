"""Token attributes of every form that senders use → packed columns."""

import json
import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.collector.process import Attribute, any_value
from trainspan_collector.rows.tokens import pack_ids, pack_logprobs, packed_lists
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs, encode_ids

ids = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 300), max_size=40)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(ids)
def test_ids_as_bytes_as_integers_and_as_json_pack_alike(numbers: list[int]) -> None:
    packed = encode_ids(numbers)
    assert pack_ids(any_value(packed)) == packed
    assert pack_ids(any_value(list(numbers))) == packed
    assert pack_ids(any_value(json.dumps(numbers))) == packed


def test_ids_at_each_width_of_their_encoding_are_read() -> None:
    numbers = [0, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21, 2**28 - 1, 2**28, 2**31 - 1]
    assert decode_ids(pack_ids(any_value(list(numbers)))) == numbers


def test_negative_ids_are_kept_since_some_engines_pad_with_them() -> None:
    assert decode_ids(pack_ids(any_value([5, -1, 7]))) == [5, -1, 7]


@given(st.lists(float32s, max_size=40))
def test_logprobs_as_bytes_doubles_and_json_pack_alike(numbers: list[float]) -> None:
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    assert pack_logprobs(any_value(packed)) == packed
    assert pack_logprobs(any_value(list(numbers))) == packed
    assert pack_logprobs(any_value(json.dumps(numbers))) == packed


def test_logprobs_may_mix_integers_in() -> None:
    assert decode_logprobs(pack_logprobs(any_value([-0.5, 0, -2.0]))) == [-0.5, 0.0, -2.0]


@pytest.mark.parametrize(
    "value",
    [b"12345", [1, "2"], [1.5], [2**31], "[1, 2.5]", "[true]", "not json", '{"a": 1}', "[" * 10_000, 7, None, {"a": 1}],
)
def test_what_is_no_list_of_ids_is_refused(value: Attribute) -> None:
    with pytest.raises(InvalidRecordError):
        pack_ids(any_value(value))


@pytest.mark.parametrize("value", [f"[-0.5, {10**400}]", "[true]", "not json", {"a": 1}])
def test_what_is_no_list_of_logprobs_is_refused(value: Attribute) -> None:
    with pytest.raises(InvalidRecordError):
        pack_logprobs(any_value(value))


@given(st.lists(st.none() | ids, max_size=12))
def test_packed_rows_become_a_list_column(rows: list[list[int] | None]) -> None:
    column = packed_lists([None if row is None else encode_ids(row) for row in rows], pa.int32())
    column.validate(full=True)
    assert column.to_pylist() == rows
