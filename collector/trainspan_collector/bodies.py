"""Compressed request bodies: gunzipped no further than a limit."""

import zlib
from typing import Final

__all__ = ["TooLargeError", "gunzip"]

_GZIP: Final = 16 + zlib.MAX_WBITS
_MAX_MEMBERS: Final = 16  # each costs a copy of what follows it


class TooLargeError(Exception):
    """A body is larger than the limit."""

    def __init__(self, max_bytes: int, form: str) -> None:
        super().__init__(
            f"the body has more than {max_bytes} bytes {form}: send smaller batches, or raise max_request_bytes"
        )


def gunzip(data: bytes, max_bytes: int) -> bytes:
    """What the gzip members in `data` hold. Stops at `max_bytes` with TooLargeError; raises ValueError for no gzip."""
    parts: list[bytes] = []
    left = max_bytes
    while data:
        if len(parts) == _MAX_MEMBERS:
            raise ValueError(f"the gzip body has more than {_MAX_MEMBERS} members")
        member = zlib.decompressobj(_GZIP)
        try:
            part = member.decompress(data, left + 1)
        except zlib.error as error:
            raise ValueError(f"the body is no gzip: {error}") from error
        if len(part) > left:
            raise TooLargeError(max_bytes, "when decompressed")
        if not member.eof:
            raise ValueError("the gzip body is cut off")
        parts.append(part)
        left -= len(part)
        data = member.unused_data.lstrip(b"\0")
    return b"".join(parts)
