"""Fills a store without a collector: batches as the loader does, or many rows at once by SQL."""

from collections.abc import Sequence
from pathlib import Path

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.collector import trace_request
from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.journal.segments import Position, Progress
from trainspan_collector.journal.trust import Sender
from trainspan_collector.rows.batch import Batch
from trainspan_collector.store.database import Database
from trainspan_collector.store.insert import load
from trainspan_collector.store.key_index import KeyIndex

__all__ = ["Filling"]

_MANY = """
INSERT INTO stored.spans BY NAME
SELECT
    $after + i AS seq, hash($after + i) AS span_key, 9223372036854775807 AS richness,
    printf('%016x%016x', hash(i), $after + i) AS trace_id, printf('%016x', hash($after + i)) AS span_id, false AS is_call
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
        progress = Progress(Position(1, self.last_seq), self.last_seq)
        return load(self.cursor, self.index, self.row_groups, batch.tables(), progress)

    def add_spans(self, spans: Sequence[Span], *, received_ns: int = 1) -> int:
        return self.add(Signal.TRACES, trace_request(*spans).SerializeToString(), received_ns=received_ns)

    def add_many(self, n_spans: int) -> None:
        """Adds spans with nothing but unique ids, as if they had been loaded, except for the index."""
        self.cursor.execute(_MANY, {"after": self.last_seq, "n": n_spans})
        self.last_seq += n_spans
        self.cursor.execute("UPDATE stored.progress SET last_seq = ?", [self.last_seq])

    def close(self) -> None:
        self.index.close()
        self.cursor.close()
