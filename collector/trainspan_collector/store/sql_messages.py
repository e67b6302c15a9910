"""What the process of a user's query writes: frames of a kind, a length and as many bytes."""

from struct import Struct
from typing import Final

__all__ = ["END", "FAILED", "HEAD", "MESSAGE", "REFUSED"]

HEAD: Final = Struct("<BI")
"""Kind and length."""
MESSAGE: Final = 0
"""An Arrow IPC message as a FlightData."""
END: Final = 1
REFUSED: Final = 2
"""Why it is no query that users may make."""
FAILED: Final = 3
"""Why there is no answer."""
