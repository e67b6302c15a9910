"""Export requests that wait on disk for the collector, oldest first, in a bounded folder that outlives the server.

Each is one file, `{number}-{spans}.otlp`, written under a temporary name and renamed.
"""

import contextlib
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Spool", "Spooled"]

_SUFFIX = ".otlp"


@dataclass(frozen=True, slots=True)
class Spooled:
    """One export request on disk."""

    path: Path
    spans: int
    size_bytes: int
    recovered: bool
    """Left by an earlier life of the server."""


class Spool:
    """For one thread; `max_bytes` bounds the folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._folder, self._max_bytes = folder, max_bytes
        self._waiting = deque(self._found())
        self._number = int(self._waiting[-1].path.name.partition("-")[0]) + 1 if self._waiting else 0
        self._bytes = sum(one.size_bytes for one in self._waiting)
        self.spans = 0
        """Spans of this life of the server that wait."""
        self.recovered = sum(one.spans for one in self._waiting)
        """Spans of earlier lives that wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: bytes, spans: int) -> str | None:
        """Adds a serialized request with its number of spans; why it could not be kept, None where it was."""
        if self._bytes + len(request) > self._max_bytes:
            return f"the spool of {self._max_bytes} bytes is full: is the collector running?"
        path = self._folder / f"{self._number:016d}-{spans}{_SUFFIX}"
        temporary = path.with_suffix(".tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(request)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return f"the spool cannot be written: {error}"
        self._number += 1
        self._bytes += len(request)
        self.spans += spans
        self._waiting.append(Spooled(path, spans, len(request), recovered=False))
        return None

    def oldest(self) -> tuple[Spooled, bytes | None]:
        """The request to send next and its bytes, None where its file cannot be read any more."""
        one = self._waiting[0]
        try:
            return one, one.path.read_bytes()
        except OSError:
            return one, None

    def remove(self, one: Spooled) -> None:
        """Takes the oldest request out."""
        self._waiting.popleft()
        self._bytes -= one.size_bytes
        if one.recovered:
            self.recovered -= one.spans
        else:
            self.spans -= one.spans
        with contextlib.suppress(OSError):
            one.path.unlink(missing_ok=True)

    def _found(self) -> list[Spooled]:
        for leftover in self._folder.glob("*.tmp"):
            leftover.unlink()
        found = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            number, _, spans = path.stem.partition("-")
            if number.isdigit() and spans.isdigit():
                found.append(Spooled(path, int(spans), path.stat().st_size, recovered=True))
        return found
