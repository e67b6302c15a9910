"""The meaning of DuckDB's and the system's errors for the collector."""

import errno
from typing import Final

import duckdb

from trainspan_schemas.errors import StoreError

__all__ = ["ReopenError", "first_line", "is_invalidated", "lacks_memory", "may_pass"]

_PASSING: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT}
)
"""The process or the machine has too many open files, too little memory or a full disk."""


class ReopenError(StoreError):
    """The database must be closed and reopened; nothing is lost, since the journal has what was not loaded."""

    def __init__(self, message: str, *, lacks_memory: bool) -> None:
        super().__init__(message)
        self.lacks_memory = lacks_memory

    @classmethod
    def because(cls, error: Exception) -> "ReopenError":
        return cls(first_line(error), lacks_memory=lacks_memory(error))


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def is_invalidated(error: Exception) -> bool:
    """Whether the database must be reopened: DuckDB invalidates it after a checkpoint fails for lack of memory or disk."""
    return "has been invalidated" in str(error)


def lacks_memory(error: Exception) -> bool:
    """DuckDB handles 2,048 rows at a time: with long texts that can be more than its memory limit."""
    text = str(error)
    return isinstance(error, duckdb.OutOfMemoryException) or "failed to pin" in text or "failed to allocate" in text


def may_pass(error: OSError) -> bool:
    """Whether it is about the machine's current state, not about the file."""
    return error.errno in _PASSING
