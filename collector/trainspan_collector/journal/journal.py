"""The journal: it keeps acknowledged requests until DuckDB holds them.

A folder of append-only segment files (segments.py), written by one thread (segment_writer.py). A process never appends to a
segment of an earlier process, so a torn tail stays where the crash left it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainspan_collector.journal.frames import Signal, encode_header
from trainspan_collector.journal.segment_writer import SegmentWriter
from trainspan_collector.journal.segments import SUFFIX, JournalEntry, Position, Segment, read_segments, segment_number
from trainspan_collector.journal.trust import Sender

__all__ = ["Journal"]

log = logging.getLogger(__name__)

_SEGMENT_BYTES = 16 * 1024 * 1024


class Journal:
    """Opens or creates the journal in `folder`; new segments are numbered after `last_segment` and all existing ones."""

    def __init__(
        self,
        folder: Path,
        last_segment: int = 0,
        *,
        segment_bytes: int = _SEGMENT_BYTES,
        on_commit: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_commit` is called with the seconds that each group took to reach the disk."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._on_commit = on_commit
        self.last_commit = time.monotonic()
        self._names = {segment_number(path): path.name for path in folder.glob(f"*{SUFFIX}")}
        self._sizes = {segment: (folder / name).stat().st_size for segment, name in self._names.items()}
        self.found_empty = tuple(sorted(self._names[segment] for segment, size in self._sizes.items() if not size))
        """Names of segments that an earlier process left empty, or that lost their content since."""
        for name in self.found_empty:
            log.warning("journal segment=%s is empty: it was truncated, or never written to", name)
        self.n_appended = sum(self._sizes.values())
        """Bytes written so far, including those from earlier processes that still exist."""
        self._being_written: int | None = None
        self._changed = threading.Condition()
        self._nudged = False
        self._writer = SegmentWriter(folder, max([last_segment, *self._sizes]), self, segment_bytes=segment_bytes)

    def append(self, signal: Signal, body: bytes, received_ns: int, sender: Sender = Sender.RUNNER) -> None:
        """Returns once the request is on disk. Raises StoreError if it could not be written."""
        self.append_all(signal, (body,), received_ns, sender)

    def append_all(
        self, signal: Signal, bodies: Sequence[bytes], received_ns: int, sender: Sender = Sender.RUNNER
    ) -> None:
        """Returns once all requests are on disk. Raises StoreError if one could not be written."""
        self._writer.write([(encode_header(signal, received_ns, body, sender), body) for body in bodies])

    @property
    def n_pending(self) -> int:
        """Requests waiting for the disk, not counting the group being written."""
        return self._writer.n_pending

    def n_bytes(self) -> int:
        """Size of all segments."""
        with self._changed:
            return sum(self._sizes.values())

    def files(self) -> list[Path]:
        """The segments, in order."""
        with self._changed:
            return [self.folder / self._names[segment] for segment in sorted(self._sizes)]

    def end(self) -> Position:
        """The end of the journal on disk: everything acknowledged so far is before it."""
        with self._changed:
            return self._end()

    def bytes_after(self, position: Position) -> int:
        with self._changed:
            return self._bytes_after(position)

    def bytes_before(self, position: Position) -> int:
        """Bytes that `release` could delete now, not counting the segment being written."""
        with self._changed:
            return sum(size for segment, size in self._sizes.items() if segment < position.segment)

    def wait_for_bytes(self, position: Position, n_bytes: int, timeout_s: float) -> bool:
        """Waits for `n_bytes` after `position`, `nudge` or the timeout; returns whether the bytes are there."""
        with self._changed:
            self._changed.wait_for(lambda: self._nudged or self._bytes_after(position) >= n_bytes, timeout_s)
            self._nudged = False
            return self._bytes_after(position) >= n_bytes

    def nudge(self) -> None:
        """Wakes `wait_for_bytes` now."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def read(self, position: Position, max_bytes: int) -> tuple[list[JournalEntry], Position]:
        """Requests after `position`, about `max_bytes` but at least one if there is any, and where they end.

        Damage is skipped with a warning; requests after it are found.
        """
        return read_segments(self.folder, self.segments_from(position), position, max_bytes)

    def segments_from(self, position: Position) -> dict[int, Segment]:
        """Number → segment, as far as it is on disk, for the segments with anything after `position`."""
        with self._changed:
            return {
                number: Segment(self._names[number], size)
                for number, size in self._sizes.items()
                if number >= position.segment
            }

    def roll(self) -> Position:
        """Seals the segment being written, so that `release` can delete everything before the returned position."""
        self._writer.roll()
        return self.end()

    def release(self, position: Position) -> None:
        """Deletes the segments entirely before `position`; the caller has made their content durable."""
        with self._changed:
            covered = [
                segment
                for segment, size in self._sizes.items()
                if Position(segment, size) <= position and segment != self._being_written
            ]
            names = [self._names.pop(segment) for segment in covered]
            for segment in covered:
                del self._sizes[segment]
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Writes pending requests and stops; further appends raise StoreError. A second call does nothing."""
        self._writer.close()

    def segment_opened(self, segment: int, name: str) -> None:
        """Called by the writer."""
        with self._changed:
            self._being_written = segment
            self._names[segment], self._sizes[segment] = name, 0

    def segment_grew(self, segment: int, n_bytes: int, seconds: float) -> None:
        """Called by the writer."""
        with self._changed:
            self._sizes[segment] += n_bytes
            self.n_appended += n_bytes
            self._changed.notify_all()
        self.last_commit = time.monotonic()
        self._on_commit(seconds)

    def segment_sealed(self) -> None:
        """Called by the writer."""
        with self._changed:
            self._being_written = None

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
