"""Messages from the process of a user's query: frames of a kind, a length and that many bytes."""

from struct import Struct
from typing import Final

__all__ = ["END", "FAILED", "HEAD", "MESSAGE", "REFUSED"]

HEAD: Final = Struct("<BI")
"""Kind and length."""
MESSAGE: Final = 0
"""An Arrow IPC message as a FlightData."""
END: Final = 1
REFUSED: Final = 2
"""Why users may not run this query."""
FAILED: Final = 3
"""Why there is no answer."""
