"""Journal → batches of one DuckDB row group of spans each, wherever the journal holds that many."""

from collections import deque

from trainspan_collector.batch import Batch
from trainspan_collector.database import ROW_GROUP_ROWS, Progress
from trainspan_collector.frames import Frame
from trainspan_collector.journal import Entry, Journal
from trainspan_collector.quarantine import Quarantine

__all__ = ["Gathering"]

_READ_BYTES = 4 * 1024 * 1024


class Gathering:
    """Rows read from the journal and not yet loaded. For one thread."""

    def __init__(
        self,
        journal: Journal,
        progress: Progress,
        quarantine: Quarantine,
        *,
        max_bytes: int,
        n_rows: int = ROW_GROUP_ROWS,
    ) -> None:
        """Starts after `progress`; a batch is full with `n_rows` spans or `max_bytes` of the journal."""
        self._journal = journal
        self._quarantine = quarantine
        self._max_bytes = max_bytes
        self._n_rows = n_rows
        self._read_to = progress.position
        self._ahead: deque[Entry] = deque()
        self._batch = Batch(progress.last_seq)
        self._n_bytes = 0
        self._last: Entry | None = None

    @property
    def last_frame(self) -> Frame:
        """The request that was read last."""
        assert self._last is not None
        return self._last.frame

    @property
    def is_full(self) -> bool:
        return self._batch.n_spans >= self._n_rows or self._n_bytes >= self._max_bytes

    def fill(self) -> None:
        """Reads until the batch is full, or the journal is at its end."""
        while not self.is_full:
            if not self._ahead:
                entries, self._read_to = self._journal.read(self._read_to, _READ_BYTES)
                self._ahead.extend(entries)
            if not self._ahead:
                return
            self._last = self._ahead.popleft()
            try:
                self._batch.add(self._last.frame)
            except Exception as error:  # noqa: BLE001  # a fault of ours in one request must not end the loading of all
                self._quarantine.put(self._last.frame, error)
            self._n_bytes += len(self._last.frame.body)

    def wait_for_more(self, n_bytes: int, timeout_s: float) -> None:
        self._journal.wait_for_bytes(self._read_to, n_bytes, timeout_s)

    def take(self) -> tuple[Batch, Progress]:
        """The rows, cut to a row group, and the progress that loading them makes.

        What is over of the last request goes into the next batch. The position stays before that request: after a crash it
        is read again, and those of its rows that were loaded are found as duplicates.
        """
        batch, entry = self._batch, self._last
        self._n_bytes = 0
        if batch.n_spans > self._n_rows and entry is not None:
            self._batch, position = batch.split(self._n_rows), entry.start
        else:
            self._batch = Batch(batch.last_seq)
            position = self._ahead[0].start if self._ahead else self._read_to
        return batch, Progress(position, batch.last_seq)
