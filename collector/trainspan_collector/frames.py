"""The journal's file format: frames of one OTLP request each, with length and checksum.

A frame is a 24-byte little-endian header (magic, kind, body bytes, CRC-32 of kind, time and body, receive time) and the
body: the request's protobuf bytes, uncompressed. The kind is the signal, with a bit for senders that are not trusted.
A reader that meets damage looks for the next intact frame.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["HEADER_BYTES", "MAX_BODY_BYTES", "Damage", "Frame", "Signal", "encode_header", "scan_frames"]

_MAGIC = b"TSJ1"
_HEADER = struct.Struct("<4sIIIQ")
_CHECKED = struct.Struct("<IQ")
HEADER_BYTES = _HEADER.size
MAX_BODY_BYTES = 2**31 - 1
_SIGNAL_BITS = 0xFF
_UNTRUSTED_BIT = 0x100


class Signal(IntEnum):
    """What a frame's body is."""

    TRACES = 1
    """An ExportTraceServiceRequest."""
    LOGS = 2
    """An ExportLogsServiceRequest."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One acknowledged request."""

    signal: Signal
    received_ns: int
    body: bytes
    end: int
    """Offset of the byte after the frame."""
    untrusted: bool = False
    """It came with the token of a role whose word on identities and evaluations does not count (see access.py)."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are no intact frame: a torn tail (normal after a crash; nobody was told OK) or bit rot."""

    start: int
    end: int


def encode_header(signal: Signal, received_ns: int, body: bytes, *, untrusted: bool = False) -> bytes:
    kind = signal | _UNTRUSTED_BIT if untrusted else signal
    return _HEADER.pack(_MAGIC, kind, len(body), _checksum(kind, received_ns, body), received_ns)


def scan_frames(data: bytes, *, complete: bool) -> Iterator[Frame | Damage]:
    """The frames in `data`, with what lies between them.

    `complete` says that the file ends with `data`; otherwise bytes at the end that may be the start of a longer frame
    are left alone, for the caller to read on from.
    """
    position = 0
    while position < len(data):
        found = _frame_at(data, position)
        if found is None:
            if not complete and _may_continue(data, position):
                return
            start, position = position, _next_frame(data, position + 1, complete=complete)
            yield Damage(start, position)
            continue
        yield found
        position = found.end


def _checksum(kind: int, received_ns: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_CHECKED.pack(kind, received_ns)))


def _frame_at(data: bytes, position: int) -> Frame | None:
    if len(data) - position < HEADER_BYTES:
        return None
    magic, kind, length, checksum, received_ns = _HEADER.unpack_from(data, position)
    end = position + HEADER_BYTES + length
    if magic != _MAGIC or end > len(data):
        return None
    body = data[position + HEADER_BYTES : end]
    if _checksum(kind, received_ns, body) != checksum:
        return None
    return Frame(Signal(kind & _SIGNAL_BITS), received_ns, body, end, bool(kind & _UNTRUSTED_BIT))


def _may_continue(data: bytes, position: int) -> bool:
    if len(data) - position < HEADER_BYTES:
        return True
    magic, _, length, _, _ = _HEADER.unpack_from(data, position)
    end: int = position + HEADER_BYTES + length
    return magic == _MAGIC and length <= MAX_BODY_BYTES and end > len(data)


def _next_frame(data: bytes, position: int, *, complete: bool) -> int:
    while (position := data.find(_MAGIC, position)) >= 0:
        if _frame_at(data, position) or (not complete and _may_continue(data, position)):
            return position
        position += 1
    return len(data)
