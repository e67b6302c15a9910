"""Decompresses request bodies, up to a limit."""

from collections.abc import Callable
from typing import Final

from isal import isal_zlib  # takes half as long as zlib

__all__ = ["TooLargeError", "gunzip", "too_many_bytes"]

_GZIP: Final = 16 + isal_zlib.MAX_WBITS
_MAX_MEMBERS: Final = 16  # each costs a copy of everything after it
_STEP_BYTES: Final = 1024 * 1024
_FLAGS_AT: Final = 3
_RESERVED_FLAGS: Final = 0xE0
"""RFC 1952, section 2.3.1.2: a decompressor must refuse them. ISA-L does not."""


class TooLargeError(Exception):
    """A request is larger than a limit."""


def too_many_bytes(max_bytes: int, form: str) -> TooLargeError:
    return TooLargeError(
        f"the body has more than {max_bytes} bytes {form}: send smaller batches, or raise max_request_bytes"
    )


def gunzip(data: bytes, max_bytes: int, grow: Callable[[int], None] = lambda _: None) -> bytes:
    """The decompressed gzip members in `data`; `grow` is called with each part's size and may raise.

    Stops at `max_bytes` with TooLargeError; raises ValueError if `data` is not gzip.
    """
    parts: list[bytes] = []
    left = max_bytes
    n_members = 0
    while data:
        if n_members == _MAX_MEMBERS:
            raise ValueError(f"the gzip body has more than {_MAX_MEMBERS} members")
        n_members += 1
        if len(data) > _FLAGS_AT and data[_FLAGS_AT] & _RESERVED_FLAGS:
            raise ValueError("the body is not gzip: reserved flags are set")
        member = isal_zlib.decompressobj(_GZIP)
        while not member.eof:
            try:
                part = member.decompress(data, min(left + 1, _STEP_BYTES))
            except isal_zlib.error as error:  # type: ignore[misc]  # a class, unlike its stub says
                raise ValueError(f"the body is not gzip: {error}") from error
            if not part and not member.eof and not member.unconsumed_tail:
                raise ValueError("the gzip body is cut off")
            if len(part) > left:
                raise too_many_bytes(max_bytes, "when decompressed")
            grow(len(part))
            parts.append(part)
            left -= len(part)
            data = member.unconsumed_tail
        data = member.unused_data.lstrip(b"\0")
    return b"".join(parts)
