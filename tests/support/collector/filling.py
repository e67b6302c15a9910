"""Fills a store without a collector: batches as the loader does, or many rows at once by SQL; retention and compaction."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.collector.process import trace_request
from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.journal.segments import LoadProgress, Position
from trainspan_collector.journal.trust import Sender
from trainspan_collector.maintenance.retention import Retention
from trainspan_collector.maintenance.rewrite import Rewriting
from trainspan_collector.rows.batch import Batch
from trainspan_collector.store.database import Database
from trainspan_collector.store.insert import load
from trainspan_collector.store.key_index import KeyIndex

__all__ = ["Filling", "Store"]

_MANY = """
INSERT INTO stored.spans BY NAME
SELECT
    $after + i AS seq, hash($after + i) AS span_key, 4611686018427387904 AS richness,
    printf('%016x%016x', hash(i), $after + i) AS trace_id, printf('%016x', hash($after + i)) AS span_id, false AS is_call,
    's' AS name, 1000 AS start_ns, 2000 AS end_ns, 0 AS kind
FROM range(1, $n + 1) t(i)
"""


class Filling:
    """Loads spans and records into a store; must be closed."""

    def __init__(self, database: Database, index_folder: Path) -> None:
        self.cursor = database.cursor()
        self.index = KeyIndex(index_folder)
        self.row_groups = database.row_groups()
        self.last_seq = database.progress().last_seq

    def add(self, signal: Signal, body: bytes, *, untrusted: bool = False, received_ns: int = 1) -> int:
        """Returns the number of duplicates."""
        batch = Batch(self.last_seq)
        batch.add(Frame(signal, received_ns, body, 0, Sender.AGENT if untrusted else Sender.RUNNER))
        self.last_seq = batch.last_seq
        self.index.cover(self.cursor)
        progress = LoadProgress(Position(1, self.last_seq), self.last_seq)
        return load(self.cursor, self.index, self.row_groups, batch.tables(), progress).n_duplicates

    def add_spans(self, spans: Sequence[Span], *, received_ns: int = 1) -> int:
        return self.add(Signal.TRACES, trace_request(*spans).SerializeToString(), received_ns=received_ns)

    def add_many(self, n_spans: int) -> None:
        """Adds spans with nothing but unique ids, as if they had been loaded, except for the index.

        They are richer than spans without token ids.
        """
        self.cursor.execute(_MANY, {"after": self.last_seq, "n": n_spans})
        self.last_seq += n_spans
        self.cursor.execute("UPDATE stored.progress SET last_seq = ?", [self.last_seq])

    def expire(self, days: float = 1) -> int:
        """Deletes what was received before these days; returns the number of rows."""
        self.index.cover(self.cursor)
        return Retention(days, self.index).apply(self.cursor)

    def close(self) -> None:
        self.index.close()
        self.cursor.close()


class Store:
    """A store's files, which can be opened and closed repeatedly."""

    def __init__(self, folder: Path, *, memory_bytes: int = 2**28) -> None:
        self.path, self.keys = folder / "spans.duckdb", folder / "spans.duckdb.keys"
        self._memory_bytes = memory_bytes
        self.open()

    def open(self) -> None:
        self.database = Database(self.path, memory_bytes=self._memory_bytes)
        self.filling = Filling(self.database, self.keys)

    def close(self) -> None:
        self.filling.close()
        self.database.close()

    def compact(self) -> None:
        """Rewrites the file and, as after a kill just then, leaves the index as it is."""
        progress = self.database.progress()
        with closing(Rewriting(self.path, None, memory_bytes=self._memory_bytes)) as rewriting:
            rewriting.copy(self.filling.cursor, progress.last_seq)
            rewriting.finish(progress)
            self.filling.close()
            self.database.replace_with(rewriting.path)
        self.filling = Filling(self.database, self.keys)

    def differences(self) -> tuple[int, int]:
        """What `KeyIndex.compare` finds in all rows."""
        self.filling.index.cover(self.filling.cursor)
        return self.filling.index.compare(self.filling.cursor, self.filling.last_seq)
