"""Makes the texts of a protobuf message valid UTF-8: one invalid byte in one span would cost the whole batch.

Some SDKs send what a program gave them, such as a file's name or half of a character; protobuf's parsers refuse the message.
Wire format: https://protobuf.dev/programming-guides/encoding/.
"""

from collections.abc import Iterator
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

__all__ = ["repaired"]

_MOST_DEPTH: Final = 100
"""As in protobuf's parsers."""
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


def repaired(body: bytes, kind: Descriptor) -> tuple[bytes, int]:
    r"""The message with each invalid byte of a text as `\xed`, so that different texts stay different, and the number of texts.

    Raises ValueError if the bytes are not such a message.
    """
    valid, n_repaired = _repaired(memoryview(body), kind, _MOST_DEPTH)
    return (bytes(valid) if n_repaired else body), n_repaired


def _repaired(body: memoryview, kind: Descriptor, depth: int) -> "tuple[bytes | memoryview, int]":
    """A view, not a copy, of what is as it was: a text may be nested in a hundred messages."""
    if depth == 0:
        raise ValueError("its messages are nested too deeply")
    parts: list[bytes | memoryview] = []
    n_repaired, copied = 0, 0
    for number, tag_end, start, end in _delimited(body):
        field = kind.fields_by_number.get(number)
        if field is None:
            continue
        content, n_new = _content(body[start:end], field, depth)
        if n_new:
            parts += body[copied:tag_end], _varint(len(content)), content
            n_repaired, copied = n_repaired + n_new, end
    return (b"".join((*parts, body[copied:])), n_repaired) if n_repaired else (body, 0)


def _content(content: memoryview, field: FieldDescriptor, depth: int) -> "tuple[bytes | memoryview, int]":
    if field.message_type is not None:
        return _repaired(content, field.message_type, depth - 1)
    if field.type != FieldDescriptor.TYPE_STRING:
        return content, 0
    try:
        str(content, "utf-8")
    except UnicodeDecodeError:
        return str(content, "utf-8", "backslashreplace").encode(), 1
    return content, 0


def _delimited(body: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Number, end of the tag, start and end of the content of each field with a length."""
    at = 0
    while at < len(body):
        tag, at = _number(body, at)
        wire_type, tag_end = tag & 7, at
        if wire_type == _VARINT:
            _, at = _number(body, at)
        elif wire_type == _DELIMITED:
            length, start = _number(body, at)
            at = start + length
            if at <= len(body):
                yield tag >> 3, tag_end, start, at
        elif wire_type in (_FIXED64, _FIXED32):
            at += 8 if wire_type == _FIXED64 else 4
        else:
            raise ValueError(f"it has a field of wire type {wire_type}")
        if at > len(body):
            raise ValueError("a field ends beyond its message")


def _number(body: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(body):
            raise ValueError("a field ends beyond its message")
        octet = body[at]
        at += 1
        number |= (octet & 0x7F) << shift
        if octet < 0x80:
            return number, at
    raise ValueError("it has a number of more than ten bytes")


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)
