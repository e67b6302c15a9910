import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs, encode_ids, encode_logprobs


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert decode_ids(encode_ids(ids)) == ids


@given(st.lists(st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)))
def test_logprobs_survive_packing_as_float32(logprobs: list[float]) -> None:
    assert decode_logprobs(encode_logprobs(logprobs)) == logprobs


def test_the_packing_is_little_endian_int32_and_float32() -> None:
    assert encode_ids([1, 70000]) == struct.pack("<ii", 1, 70000)
    assert encode_logprobs([-0.5]) == struct.pack("<f", -0.5)


def test_arrays_and_json_text_of_foreign_senders_are_read() -> None:
    assert decode_ids("[3, 4]") == decode_ids((3, 4)) == [3, 4]
    assert decode_logprobs("[-0.5, -1]") == [-0.5, -1.0]


@pytest.mark.parametrize("value", [b"\x01\x02\x03", "not json", '{"a": 1}'])
def test_anything_else_is_an_error(value: bytes | str) -> None:
    with pytest.raises(InvalidRecordError):
        decode_ids(value)
