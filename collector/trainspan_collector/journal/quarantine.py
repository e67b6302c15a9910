"""The quarantine for acknowledged requests that cannot be turned into rows: kept whole, named and counted, never lost.

Anything that a sender can write converts, so this is for our own bugs: one request must not stop the loading of all others.
A file holds the request's protobuf bytes; once the bug is fixed, it can be sent again and is loaded.
"""

import logging
import os
import threading
import zlib
from pathlib import Path

from trainspan_collector.journal.frames import Frame

__all__ = ["Quarantine"]

log = logging.getLogger(__name__)


class Quarantine:
    """The folder `<store>.quarantine`, created when first needed. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self.n_requests = 0

    def put(self, frame: Frame, error: Exception) -> Path:
        """Keeps `frame` in a file named after its content: a request read again after a crash is kept only once."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        name = f"{frame.received_ns}-{zlib.crc32(frame.body):08x}.{frame.signal.name.lower()}.pb"
        path = self.folder / name
        temporary = path.with_name(f".{name}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(frame.body)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
        with self._lock:
            self.n_requests += 1
        log.error("request cannot be stored kept_as=%s bytes=%d error=%r", path, len(frame.body), error)
        return path
