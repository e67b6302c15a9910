"""The journal's file format: frames of one OTLP request each, with length and checksum.

A frame is a header (the file's marker, then little-endian kind, body bytes, CRC-32 of kind, time and body, receive time) and
the body: the request's protobuf bytes, uncompressed. The kind encodes the signal and the sender.

After damage, a reader searches for the next intact frame, possibly within a sender's text. So each file has a random marker
that no sender can know, and no text can contain a valid frame.
"""

import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from isal.isal_zlib import crc32  # zlib's takes eight times as long

from trainspan_collector.journal.trust import Sender

__all__ = [
    "HEADER_BYTES",
    "MAX_BODY_BYTES",
    "Damage",
    "Frame",
    "Signal",
    "encode_header",
    "new_marker",
    "scan_frames",
]

_MARKER_BYTES = 8
_HEADER = struct.Struct("<IIIQ")
_CHECKED = struct.Struct("<IQ")
HEADER_BYTES = _MARKER_BYTES + _HEADER.size
MAX_BODY_BYTES = 2**31 - 1
_SIGNAL_BITS = 0xFF
_SENDER_BITS = 0x3
_SENDER_SHIFT = 8


class Signal(IntEnum):
    """The type of a frame's body."""

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
    sender: Sender = Sender.RUNNER


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not an intact frame: a torn tail (normal after a crash; never acknowledged) or bit rot."""

    start: int
    end: int


def new_marker() -> bytes:
    """A marker for one file, to be kept secret from everyone who cannot read that file."""
    return secrets.token_bytes(_MARKER_BYTES)


def encode_header(signal: Signal, received_ns: int, body: bytes, sender: Sender = Sender.RUNNER) -> bytes:
    """The bytes between the file's marker and the body."""
    kind = signal | sender << _SENDER_SHIFT
    return _HEADER.pack(kind, len(body), _checksum(kind, received_ns, body), received_ns)


def scan_frames(data: bytes, marker: bytes, *, complete: bool) -> Iterator[Frame | Damage]:
    """The frames in `data`, from a file with this marker, and the damage between them.

    `complete` means that the file ends with `data`; otherwise trailing bytes that may be the start of a longer frame, or of
    its marker, are left for the caller to continue from.
    """
    position = 0
    while position < len(data):
        frame = _frame_at(data, marker, position)
        if frame is None:
            if not complete and _may_continue(data, marker, position):
                return
            start, position = position, _next_frame(data, marker, position + 1, complete=complete)
            yield Damage(start, position)
            continue
        yield frame
        position = frame.end


def _checksum(kind: int, received_ns: int, body: bytes) -> int:
    return crc32(body, crc32(_CHECKED.pack(kind, received_ns)))


def _frame_at(data: bytes, marker: bytes, position: int) -> Frame | None:
    start = position + len(marker) + _HEADER.size
    if len(data) < start or not data.startswith(marker, position):
        return None
    kind, length, checksum, received_ns = _HEADER.unpack_from(data, position + len(marker))
    end = start + length
    if end > len(data):
        return None
    body = data[start:end]
    if _checksum(kind, received_ns, body) != checksum:
        return None
    return Frame(Signal(kind & _SIGNAL_BITS), received_ns, body, end, Sender(kind >> _SENDER_SHIFT & _SENDER_BITS))


def _may_continue(data: bytes, marker: bytes, position: int) -> bool:
    start = position + len(marker) + _HEADER.size
    if len(data) < start:
        return True
    _, length, _, _ = _HEADER.unpack_from(data, position + len(marker))
    return data.startswith(marker, position) and length <= MAX_BODY_BYTES and start + int(length) > len(data)


def _next_frame(data: bytes, marker: bytes, position: int, *, complete: bool) -> int:
    while (start := data.find(marker, position)) >= 0:
        if _frame_at(data, marker, start) or (not complete and _may_continue(data, marker, start)):
            return start
        position = start + 1
    return len(data) if complete else max(position, len(data) - len(marker) + 1)
