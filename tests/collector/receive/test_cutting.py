"""Counting a request's items from its bytes alone."""

import pytest

from trainspan_collector.otlp.gunzip import TooLargeError
from trainspan_collector.otlp.signals import TRACES
from trainspan_collector.receive.cutting import split_message
from trainspan_schemas.errors import InvalidRecordError

MIB = 2**20


def field(number: int, value: bytes) -> bytes:
    length, octets = len(value), bytearray([number << 3 | 2])
    while length >= 0x80:
        octets.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes(octets) + bytes([length]) + value


ATTRIBUTES = field(1, b"") * (MIB // 4)
SPAN = field(2, field(1, b"x" * 16))


@pytest.mark.parametrize(
    "body",
    [
        field(1, field(1, ATTRIBUTES) * 8 + field(2, SPAN)),
        field(1, field(2, field(1, field(3, b"") * (MIB // 4)) * 8 + SPAN)),
        b"\x10\x00" * MIB,
        field(1, b"\x18\x00" * MIB),
        field(1, field(2, b"\x18\x00" * MIB + SPAN)),
    ],
    ids=["merged resources", "merged scopes", "fields of the request", "fields of a group", "fields of a scope group"],
)
def test_fields_next_to_items_are_counted_too(body: bytes) -> None:
    with pytest.raises(TooLargeError):
        list(split_message(TRACES, body, 200_000))


def test_a_tag_written_longer_than_it_need_be_hides_no_item() -> None:
    body = field(1, field(2, b"\x92\x00\x00" * 600_000))
    with pytest.raises(InvalidRecordError):
        list(split_message(TRACES, body, 200_000))
