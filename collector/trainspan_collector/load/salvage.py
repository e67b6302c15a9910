"""A batch that DuckDB refuses is loaded request by request; a request that cannot be stored is quarantined."""

import logging
import sys

from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.journal.segments import Position
from trainspan_collector.load.batcher import Batcher
from trainspan_collector.load.committer import Committer, NotStorableError
from trainspan_collector.rows.batch import Batch
from trainspan_collector.store.duckdb_errors import first_line

__all__ = ["salvage"]

log = logging.getLogger(__name__)


def salvage(
    journal: Journal, quarantine: Quarantine, committer: Committer, end: Position, reason: Exception | None
) -> None:
    """Loads at least one request, and all up to `end`, each in its own transaction. Raises like `Committer.commit`."""
    log.error(
        "batch cannot be stored error=%r: storing its requests one at a time", first_line(reason) if reason else ""
    )
    alone = Batcher(journal, committer.progress, quarantine, max_bytes=1, n_rows=sys.maxsize)
    while True:
        alone.fill()
        taken = alone.next_batch()
        progress, error = taken.progress, taken.error
        if taken.tables is not None:
            try:
                committer.commit(taken.tables, progress)
            except NotStorableError as refused:
                error = refused.error
        if error is not None:
            quarantine.put(alone.last_frame, error)
            committer.commit(Batch(progress.last_seq).tables(), progress)
        if progress.position >= end:
            return
