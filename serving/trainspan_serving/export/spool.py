"""Export requests that wait on disk for the collector, oldest first, in a bounded folder that outlives the server.

Each is one file, `{number}-{spans}-{crc32}.otlp`: written under a temporary name, synced and renamed. A file that does
not match its checksum is never sent. Requests that the collector refused permanently stay in `refused/` until the next
start.
"""

import contextlib
import os
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from trainspan_schemas.files.durable import sync

__all__ = ["Spool", "Spooled"]

_SUFFIX = ".otlp"
_REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Spooled:
    """One export request on disk."""

    path: Path
    spans: int
    crc32: int
    size_bytes: int
    recovered: bool
    """Whether an earlier server process left it."""


class Spool:
    """A spool for one thread of one process; `max_bytes` bounds the folder, refused requests included."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._refused, self._max_bytes = folder, folder / _REFUSED, max_bytes
        for directory in (folder, self._refused):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o700)
        self._waiting = deque(self._recover())
        self._number = 1 + max((int(spooled.path.name.partition("-")[0]) for spooled in self._waiting), default=-1)
        self._bytes = sum(spooled.size_bytes for spooled in self._waiting)
        self.spans = 0
        """Waiting spans of this server process."""
        self.recovered = sum(spooled.spans for spooled in self._waiting)
        """Waiting spans of earlier server processes."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: bytes, spans: int) -> str | None:
        """Adds a serialized request with its number of spans; returns the reason if it could not be kept."""
        spooled = self._write(self._folder, request, spans)
        if isinstance(spooled, str):
            return spooled
        self.spans += spans
        self._waiting.append(spooled)
        return None

    def put_refused(self, request: bytes, spans: int) -> str | None:
        """Keeps a request that the collector refused; returns the reason if it could not be kept."""
        spooled = self._write(self._refused, request, spans)
        return spooled if isinstance(spooled, str) else None

    def oldest(self) -> tuple[Spooled, bytes | None]:
        """Returns the request to send next and its bytes, None if its file is missing or damaged.

        Raises OSError if the file cannot be read now.
        """
        spooled = self._waiting[0]
        try:
            request = spooled.path.read_bytes()
        except FileNotFoundError:
            return spooled, None
        return spooled, request if zlib.crc32(request) == spooled.crc32 else None

    def remove(self, spooled: Spooled) -> None:
        """Removes the oldest request, which has been delivered or is lost."""
        self._take(spooled)
        self._bytes -= spooled.size_bytes
        with contextlib.suppress(OSError):
            spooled.path.unlink(missing_ok=True)

    def refuse(self, spooled: Spooled) -> None:
        """Moves the oldest request, which the collector refused, to `refused/`."""
        self._take(spooled)
        with contextlib.suppress(OSError):
            spooled.path.rename(self._refused / spooled.path.name)

    def _take(self, spooled: Spooled) -> None:
        self._waiting.popleft()
        if spooled.recovered:
            self.recovered -= spooled.spans
        else:
            self.spans -= spooled.spans

    def _write(self, folder: Path, request: bytes, spans: int) -> Spooled | str:
        if self._bytes + len(request) > self._max_bytes:
            return f"the spool of {self._max_bytes} bytes is full: is the collector running?"
        crc32 = zlib.crc32(request)
        path = folder / f"{self._number:016d}-{spans}-{crc32:08x}{_SUFFIX}"
        temporary = path.with_suffix(".tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(request)
                file.flush()
                os.fsync(descriptor)
            temporary.replace(path)
            sync(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return f"cannot write to the spool: {error}"
        self._number += 1
        self._bytes += len(request)
        return Spooled(path, spans, crc32, len(request), recovered=False)

    def _recover(self) -> list[Spooled]:
        """Returns all requests left by earlier server processes, in order; refused ones are retried."""
        for leftover in (*self._folder.glob("*.tmp"), *self._refused.glob("*.tmp")):
            leftover.unlink()
        for path in self._refused.glob(f"*{_SUFFIX}"):
            path.rename(self._folder / path.name)
        requests = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            number, spans, crc32 = [*path.stem.split("-"), "", ""][:3]
            if number.isdigit() and spans.isdigit() and len(crc32) == 8:
                with contextlib.suppress(ValueError):
                    requests.append(Spooled(path, int(spans), int(crc32, 16), path.stat().st_size, recovered=True))
        return requests
