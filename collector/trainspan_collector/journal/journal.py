"""The journal: what was acknowledged lies here until DuckDB holds it.

A folder of append-only segment files (segments.py). One thread writes: it takes every pending request, writes
them with one system call, calls `fdatasync`, then releases all who wait (group commit). A process never appends to a
segment of an earlier one, so a torn tail stays where the crash left it.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainspan_collector.journal.frames import Signal, encode_header, new_marker
from trainspan_collector.journal.segments import SUFFIX, Entry, Position, Segment, read_segments, segment_name
from trainspan_collector.journal.trust import Sender
from trainspan_schemas.errors import StoreError

__all__ = ["Journal", "sync_folder"]

log = logging.getLogger(__name__)

_SEGMENT_BYTES = 16 * 1024 * 1024
_MAX_BUFFERS = 512  # below the kernel's IOV_MAX of 1024
_NUMBER_DIGITS = 12


@dataclass(slots=True)
class _Waiting:
    header: bytes
    body: bytes
    done: threading.Event = field(default_factory=threading.Event)
    error: OSError | None = None


class Journal:
    """Opens (or makes) the journal in `folder`; new segments are numbered after `last_segment` and what is there."""

    def __init__(
        self,
        folder: Path,
        last_segment: int = 0,
        *,
        segment_bytes: int = _SEGMENT_BYTES,
        on_commit: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_commit` is told the seconds that each group took to be on disk."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._on_commit = on_commit
        self.last_commit = time.monotonic()
        self._names = {int(path.name[:_NUMBER_DIGITS]): path.name for path in folder.glob(f"*{SUFFIX}")}
        self._sizes = {segment: (folder / name).stat().st_size for segment, name in self._names.items()}
        self._last_segment = max([last_segment, *self._sizes])
        self.n_appended = sum(self._sizes.values())
        """Bytes written so far, those of earlier processes that are still there included."""
        self._folder_file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # else a segment would need two at once
        self._file: int | None = None
        self._marker = b""
        self._pending: list[_Waiting] = []
        self._changed = threading.Condition()
        self._closing = False
        self._nudged = False
        self._rolling = False
        self._writer = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._writer.start()

    def append(self, signal: Signal, body: bytes, received_ns: int, sender: Sender = Sender.RUNNER) -> None:
        """Returns once the request is on disk. Raises StoreError where it could not be written."""
        self.append_all(signal, (body,), received_ns, sender)

    def append_all(
        self, signal: Signal, bodies: Sequence[bytes], received_ns: int, sender: Sender = Sender.RUNNER
    ) -> None:
        """Returns once all requests are on disk. Raises StoreError where one could not be written."""
        all_waiting = [_Waiting(encode_header(signal, received_ns, body, sender), body) for body in bodies]
        with self._changed:
            if self._closing:
                raise StoreError("the journal is closed: the collector is stopping")
            self._pending += all_waiting
            self._changed.notify_all()
        for waiting in all_waiting:
            waiting.done.wait()
        for waiting in all_waiting:
            if waiting.error is not None:
                raise StoreError(f"cannot write the journal in {self.folder}: {waiting.error}") from waiting.error

    @property
    def n_pending(self) -> int:
        """Requests that wait for the disk, but for the group being written."""
        return len(self._pending)

    def n_bytes(self) -> int:
        """Size of all segments."""
        with self._changed:
            return sum(self._sizes.values())

    def files(self) -> list[Path]:
        """The segments, in order."""
        with self._changed:
            return [self.folder / self._names[segment] for segment in sorted(self._sizes)]

    def end(self) -> Position:
        """The end of what is on disk: everything acknowledged so far lies before it."""
        with self._changed:
            return self._end()

    def bytes_after(self, position: Position) -> int:
        with self._changed:
            return self._bytes_after(position)

    def bytes_before(self, position: Position) -> int:
        """What `release` could delete now, the segment being written aside."""
        with self._changed:
            return sum(size for segment, size in self._sizes.items() if segment < position.segment)

    def wait_for_bytes(self, position: Position, n_bytes: int, timeout_s: float) -> bool:
        """Waits until `n_bytes` lie after `position`, or `nudge` is called, or the time is over; whether they do."""
        with self._changed:
            self._changed.wait_for(lambda: self._nudged or self._bytes_after(position) >= n_bytes, timeout_s)
            self._nudged = False
            return self._bytes_after(position) >= n_bytes

    def nudge(self) -> None:
        """Ends a `wait_for_bytes` now."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def read(self, position: Position, max_bytes: int) -> tuple[list[Entry], Position]:
        """Requests after `position`, of about `max_bytes` but at least one where there is one, and where they end.

        Damage is skipped with a warning; requests after it are found.
        """
        return read_segments(self.folder, self.segments_from(position), position, max_bytes)

    def segments_from(self, position: Position) -> dict[int, Segment]:
        """Number → what is on disk, of those segments that hold what comes after `position`."""
        with self._changed:
            return {
                number: Segment(self._names[number], size)
                for number, size in self._sizes.items()
                if number >= position.segment
            }

    def roll(self) -> Position:
        """Ends the segment being written, so that `release` can delete all before the position returned."""
        with self._changed:
            self._rolling = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._rolling or self._closing)
            return self._end()

    def release(self, position: Position) -> None:
        """Deletes the segments that lie wholly before `position`; the caller has made their content safe."""
        with self._changed:
            covered = [
                segment
                for segment, size in self._sizes.items()
                if Position(segment, size) <= position and (self._file is None or segment != self._last_segment)
            ]
            names = [self._names.pop(segment) for segment in covered]
            for segment in covered:
                del self._sizes[segment]
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Writes what is pending and stops; further appends raise StoreError. A second call does nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._writer.join()
        self._seal()
        os.close(self._folder_file)

    def _end(self) -> Position:
        last = max(
            (segment for segment, size in self._sizes.items() if size), default=0
        )  # a failed write leaves empty ones
        return Position(last, self._sizes.get(last, 0))

    def _bytes_after(self, position: Position) -> int:
        return sum(
            size - (position.offset if segment == position.segment else 0)
            for segment, size in self._sizes.items()
            if segment >= position.segment
        )

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing or self._rolling)
                batch, self._pending = self._pending, []
                rolling = self._rolling
            if rolling:
                self._seal()
                with self._changed:
                    self._rolling = False
                    self._changed.notify_all()
            if not batch:
                if self._closing:
                    return
                continue
            began = time.monotonic()
            try:
                size = self._write(batch)
            except OSError as error:
                # What did reach the file is a torn tail; the next request gets a segment of its own.
                log.error("journal write failed folder=%s requests=%d error=%s", self.folder, len(batch), error)
                self._seal()
                for waiting in batch:
                    waiting.error = error
            else:
                with self._changed:
                    self._sizes[self._last_segment] += size
                    self.n_appended += size
                    self._changed.notify_all()
                self.last_commit = time.monotonic()
                self._on_commit(self.last_commit - began)
            for waiting in batch:
                waiting.done.set()

    def _write(self, batch: list[_Waiting]) -> int:
        file = self._writable_segment()
        buffers = [buffer for waiting in batch for buffer in (self._marker, waiting.header, waiting.body)]
        for group in range(0, len(buffers), _MAX_BUFFERS):
            _write_buffers(file, buffers[group : group + _MAX_BUFFERS])
        os.fdatasync(file)
        return sum(map(len, buffers))

    def _writable_segment(self) -> int:
        if self._file is not None and self._sizes[self._last_segment] >= self._segment_bytes:
            self._seal()
        if self._file is None:
            segment, self._marker = self._last_segment + 1, new_marker()
            name = segment_name(segment, self._marker)
            file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            with self._changed:
                self._last_segment, self._file = segment, file
                self._names[segment], self._sizes[segment] = name, 0
            os.fsync(self._folder_file)
        assert self._file is not None
        return self._file

    def _seal(self) -> None:
        with self._changed:
            file, self._file = self._file, None
        if file is not None:
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


def sync_folder(folder: Path) -> None:
    """Makes files that were made, renamed or deleted in `folder` stay so."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
