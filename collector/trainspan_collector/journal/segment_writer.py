"""The journal's writer: one thread that puts requests on disk, many at a time.

It takes all pending requests, writes them with one system call, calls `fdatasync`, then releases all waiters (group commit).
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trainspan_collector.journal.frames import new_marker
from trainspan_collector.journal.segments import segment_name
from trainspan_schemas.errors import StoreError

__all__ = ["SegmentObserver", "SegmentWriter"]

log = logging.getLogger(__name__)

_MAX_BUFFERS = 512  # below the kernel's IOV_MAX of 1024


class SegmentObserver(Protocol):
    """Receives the events of the segment files, in the writer's thread."""

    def segment_opened(self, segment: int, name: str) -> None:
        """Writing goes to this segment from now on."""

    def segment_grew(self, segment: int, n_bytes: int, seconds: float) -> None:
        """`n_bytes` more are on disk, which took `seconds`."""

    def segment_sealed(self) -> None:
        """The segment opened last is no longer written."""


@dataclass(slots=True)
class _Request:
    header: bytes
    body: bytes
    done: threading.Event = field(default_factory=threading.Event)
    error: OSError | None = None


class SegmentWriter:
    """Appends to segments in `folder` that are numbered after `last_segment`. Thread-safe."""

    def __init__(self, folder: Path, last_segment: int, observer: SegmentObserver, *, segment_bytes: int) -> None:
        self._folder = folder
        self._segment = last_segment
        self._observer = observer
        self._segment_bytes = segment_bytes
        self._folder_file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # else a new segment would take two
        self._file: int | None = None
        self._n_bytes = 0
        self._marker = b""
        self._pending: list[_Request] = []
        self._asked = threading.Condition()
        self._closing = False
        self._rolling = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def n_pending(self) -> int:
        """Requests waiting for the disk, not counting the group being written."""
        return len(self._pending)

    def write(self, frames: Sequence[tuple[bytes, bytes]]) -> None:
        """Returns once all frames (header, body) are on disk. Raises StoreError if one could not be written."""
        requests = [_Request(header, body) for header, body in frames]
        with self._asked:
            if self._closing:
                raise StoreError("the journal is closed: the collector is stopping")
            self._pending += requests
            self._asked.notify_all()
        for request in requests:
            request.done.wait()
        for request in requests:
            if request.error is not None:
                raise StoreError(f"cannot write the journal in {self._folder}: {request.error}") from request.error

    def roll(self) -> None:
        """Seals the segment being written; the next request gets a new one."""
        with self._asked:
            self._rolling = True
            self._asked.notify_all()
            self._asked.wait_for(lambda: not self._rolling or self._closing)

    def close(self) -> None:
        """Writes pending requests and stops. A second call does nothing."""
        with self._asked:
            if self._closing:
                return
            self._closing = True
            self._asked.notify_all()
        self._thread.join()
        self._seal()
        os.close(self._folder_file)

    def _run(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._pending or self._closing or self._rolling)
                group, self._pending = self._pending, []
                rolling = self._rolling
            if rolling:
                self._seal()
                with self._asked:
                    self._rolling = False
                    self._asked.notify_all()
            if group:
                self._commit(group)
            elif self._closing:
                return

    def _commit(self, group: list[_Request]) -> None:
        began = time.monotonic()
        try:
            n_bytes = self._write(group)
        except OSError as error:
            # Whatever reached the file is a torn tail; the next request gets a new segment.
            log.error("journal write failed folder=%s requests=%d error=%s", self._folder, len(group), error)
            self._seal()
            for request in group:
                request.error = error
        else:
            self._n_bytes += n_bytes
            self._observer.segment_grew(self._segment, n_bytes, time.monotonic() - began)
        for request in group:
            request.done.set()

    def _write(self, group: list[_Request]) -> int:
        file = self._writable_segment()
        buffers = [buffer for request in group for buffer in (self._marker, request.header, request.body)]
        for first in range(0, len(buffers), _MAX_BUFFERS):
            _write_buffers(file, buffers[first : first + _MAX_BUFFERS])
        os.fdatasync(file)
        return sum(map(len, buffers))

    def _writable_segment(self) -> int:
        if self._file is not None and self._n_bytes >= self._segment_bytes:
            self._seal()
        if self._file is None:
            segment, self._marker = self._segment + 1, new_marker()
            name = segment_name(segment, self._marker)
            # Not O_APPEND: if someone cuts the file, what comes next still gets the place at which it is read.
            self._file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._segment, self._n_bytes = segment, 0
            self._observer.segment_opened(segment, name)
            os.fsync(self._folder_file)
        return self._file

    def _seal(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._observer.segment_sealed()
            with contextlib.suppress(OSError):
                os.close(file)


def _write_buffers(file: int, buffers: list[bytes]) -> None:
    written = os.writev(file, buffers)
    for rest in _unwritten(buffers, written):
        view = memoryview(rest)
        while view:
            view = view[os.write(file, view) :]


def _unwritten(buffers: list[bytes], written: int) -> Iterator[bytes]:
    for buffer in buffers:
        if written < len(buffer):
            yield buffer[written:] if written else buffer
        written = max(0, written - len(buffer))
