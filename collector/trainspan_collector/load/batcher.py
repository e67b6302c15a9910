"""Journal → batches, each of one DuckDB row group of spans if the journal holds that many."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from trainspan_collector.journal.frames import Frame
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.journal.segments import JournalEntry, LoadProgress, Position
from trainspan_collector.rows.batch import Batch, Tables
from trainspan_collector.rows.tables import ROW_GROUP_ROWS
from trainspan_collector.store.row_groups import BATCH_BYTES

__all__ = ["Batcher", "PendingBatch", "ReadyBatch"]

_READ_BYTES = 4 * 1024 * 1024
_ROWS_PER_SPAN = 4  # of all kinds: log records and evaluations take memory too


class JournalReader(Protocol):
    """The read side of a journal."""

    def read(self, position: Position, max_bytes: int) -> tuple[list[JournalEntry], Position]:
        """Requests after `position`, about `max_bytes`, and where they end."""
        ...


@dataclass(slots=True)
class PendingBatch:
    """What was read from the journal but not loaded; another process can continue with it."""

    batch: Batch
    read_to: Position
    ahead: deque[JournalEntry] = field(default_factory=deque)
    """Read, but not in the batch yet."""
    last: JournalEntry | None = None
    """The request put into a batch last."""
    n_bytes: int = 0

    @classmethod
    def after(cls, progress: LoadProgress) -> "PendingBatch":
        return cls(Batch(progress.last_seq), progress.position)


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A batch to load."""

    tables: Tables | None
    """None if the rows do not fit their columns."""
    progress: LoadProgress
    """The progress once it is loaded."""
    error: Exception | None = None
    """Why there are no tables."""


class Batcher:
    """For use by one thread."""

    def __init__(
        self,
        journal: JournalReader,
        start: LoadProgress | PendingBatch,
        quarantine: Quarantine,
        *,
        max_bytes: int,
        n_rows: int = ROW_GROUP_ROWS,
    ) -> None:
        """Goes on from `start`; a batch is full at `n_rows` spans, `max_bytes` of the journal or BATCH_BYTES of rows."""
        self._journal = journal
        self._quarantine = quarantine
        self._max_bytes = max_bytes
        self._n_rows = n_rows
        self.gathered = PendingBatch.after(start) if isinstance(start, LoadProgress) else start

    @property
    def last_frame(self) -> Frame:
        """The request read last."""
        assert self.gathered.last is not None
        return self.gathered.last.frame

    @property
    def read_to(self) -> Position:
        return self.gathered.read_to

    @property
    def is_full(self) -> bool:
        batch = self.gathered.batch
        return (
            batch.n_spans >= self._n_rows
            or batch.n_rows >= _ROWS_PER_SPAN * self._n_rows
            or batch.n_bytes >= BATCH_BYTES
            or self.gathered.n_bytes >= self._max_bytes
        )

    def fill(self) -> None:
        """Reads until the batch is full or the journal ends."""
        gathered = self.gathered
        while not self.is_full:
            if not gathered.ahead:
                entries, gathered.read_to = self._journal.read(gathered.read_to, _READ_BYTES)
                gathered.ahead.extend(entries)
            if not gathered.ahead:
                return
            gathered.last = gathered.ahead.popleft()
            try:
                gathered.batch.add(gathered.last.frame)
            except Exception as error:  # noqa: BLE001  # our own bug in one request must not end the loading of all
                self._quarantine.put(gathered.last.frame, error)
            gathered.n_bytes += len(gathered.last.frame.body)

    def next_batch(self) -> ReadyBatch:
        """The rows, as tables, and the progress once they are loaded."""
        batch, progress = self.next_rows()
        try:
            return ReadyBatch(batch.tables(), progress)
        except (ArithmeticError, ValueError, TypeError) as error:  # Arrow's errors derive from two of these
            return ReadyBatch(None, progress, error)

    def next_rows(self) -> tuple[Batch, LoadProgress]:
        """The rows, cut to a row group, and the progress once they are loaded.

        Excess rows of the last request go into the next batch. The position stays before that request: after a crash it is
        read again, and those of its rows that were already loaded are recognized as duplicates.
        """
        gathered = self.gathered
        batch, gathered.n_bytes = gathered.batch, 0
        rest = batch.split(self._n_rows, BATCH_BYTES)
        if rest is not None and gathered.last is not None:
            gathered.batch, position = rest, gathered.last.start
        else:
            gathered.batch = Batch(batch.last_seq)
            position = gathered.ahead[0].start if gathered.ahead else gathered.read_to
        return batch, LoadProgress(position, batch.last_seq)
