"""The meaning of DuckDB's and the system's errors for the collector."""

import errno
from typing import Final

import duckdb

from trainspan_schemas.errors import StoreError

__all__ = ["ReopenError", "first_line", "is_invalidated", "is_locked", "lacks_memory", "may_pass"]

_PASSING: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT}
)
"""The process or the machine has too many open files, too little memory or a full disk."""

_LACKS_MEMORY: Final = (
    *("out of memory", "failed to pin", "failed to allocate", "bad allocation", "bad_alloc"),
    *("malloc of size", "realloc of size", "memoryerror"),
)
"""Parts of messages, in lower case: of DuckDB, the C++ library, Arrow, and of Python code that DuckDB calls."""


class ReopenError(StoreError):
    """The database must be closed and reopened; nothing is lost, since the journal has what was not loaded."""

    def __init__(self, message: str, *, lacks_memory: bool) -> None:
        super().__init__(message)
        self.lacks_memory = lacks_memory

    @classmethod
    def because(cls, error: Exception) -> "ReopenError":
        return cls(first_line(error), lacks_memory=lacks_memory(error))


def first_line(error: BaseException) -> str:
    """The first line of its message; the last one if that is the traceback of Python code that DuckDB called."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1].rstrip(":") if lines[0].startswith("Traceback") else lines[0]


def is_locked(error: Exception) -> bool:
    """Whether another process has the file open. DuckDB has no type for this, and a message about a block has "lock" in it."""
    return isinstance(error, duckdb.IOException) and str(error).startswith("IO Error: Could not set lock on file ")


def is_invalidated(error: Exception) -> bool:
    """Whether the database must be reopened: DuckDB invalidates it after a checkpoint fails for lack of memory or disk."""
    return "has been invalidated" in str(error)


def lacks_memory(error: Exception) -> bool:
    """A row group, or the rows that a query sorts or joins, can be more than DuckDB's memory limit, or the process's."""
    text = str(error).lower()
    return isinstance(error, (duckdb.OutOfMemoryException, MemoryError)) or any(
        words in text for words in _LACKS_MEMORY
    )


def may_pass(error: OSError) -> bool:
    """Whether it is about the machine's current state, not about the file."""
    return error.errno in _PASSING
