"""The task of the process of a user's query, and its messages: frames of a kind, a length and that many bytes."""

from struct import Struct
from typing import Final, TypedDict

__all__ = ["END", "FAILED", "HEAD", "MESSAGE", "REFUSED", "SqlTask"]

HEAD: Final = Struct("<BI")
"""Kind and length."""
MESSAGE: Final = 0
"""An Arrow IPC message as a FlightData."""
END: Final = 1
REFUSED: Final = 2
"""Why users may not run this query."""
FAILED: Final = 3
"""Why there is no answer."""


class SqlTask(TypedDict):
    """A query, and what it may take."""

    sql: str
    metadata: dict[str, str]
    """Of the answer's schema."""
    log_bytes: int
    memory_bytes: int
    seconds: float
    largest_row_bytes: int
    folder: str
    """Where it spills."""
    spill_bytes: int
