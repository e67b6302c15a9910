"""Maintenance of a store during collection: verify, stats, compact, purge. Called through Flight's `DoAction`.

Actions and their JSON bodies: `backlog`, `verify`, `compact` (`{}`), `stats` (`{"wait_ms": n}` for the loader), and `purge`
(`{"trace_ids": [...]}`, `{"task_id": "..."}` or `{"before_ns": n}`, with `"dry_run": true` to only count).
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import duckdb

from trainspan_collector.journal.backlog import Backlog
from trainspan_collector.journal.journal import Journal
from trainspan_collector.load.loader import Loader
from trainspan_collector.maintenance.byte_search import find_bytes, find_id, needles
from trainspan_collector.maintenance.replaced_rows import ReplacedRows
from trainspan_collector.maintenance.rewrite import Rewriting
from trainspan_collector.maintenance.selection import GONE, Criteria, TraceSelection, select
from trainspan_collector.maintenance.stats import figures
from trainspan_collector.maintenance.verify import verify
from trainspan_collector.store.database import Database
from trainspan_collector.store.key_index import KeyIndex
from trainspan_collector.store.snapshots import Readers
from trainspan_schemas.errors import StoreError, UsageError

__all__ = ["Maintenance"]

log = logging.getLogger(__name__)

_LOAD_WAIT_S: Final = 600.0
_BARRIER_S: Final = 10.0
_READER_GRACE_S: Final = 10.0
_READER_END_S: Final = 20.0
_MOST_IDS_SEARCHED: Final = 100
_TABLES: Final[tuple[str, ...]] = ("spans", "logs", "evaluations")
_Answer = dict[str, object]
"""Name → JSON value."""


class Maintenance:
    """Runs one job at a time, from any thread."""

    def __init__(
        self,
        store: Path,
        database: Database,
        journal: Journal,
        loader: Loader,
        index: KeyIndex,
        readers: Readers,
        backlog: Backlog,
        replaced_rows: ReplacedRows,
        *,
        memory_bytes: int,
    ) -> None:
        self._store = store
        self._database = database
        self._journal = journal
        self._loader = loader
        self._index = index
        self._readers = readers
        self._backlog = backlog
        self._replaced_rows = replaced_rows
        self._memory_bytes = memory_bytes
        self._busy = threading.Lock()
        self._jobs: Mapping[str, Callable[[Mapping[str, Any]], _Answer]] = {
            "verify": self._verify,
            "stats": self._stats,
            "compact": self._compact,
            "purge": self._purge,
        }

    def do(self, name: str, body: Mapping[str, Any]) -> _Answer:
        """Runs a job and returns its result. Raises UsageError if the job is unknown, StoreError if it cannot run now."""
        if name == "backlog":  # at any time, even during a job
            return self._tell_backlog()
        if name not in self._jobs:
            raise UsageError(f"unknown action {name!r}; actions are {', '.join(self._jobs)}")
        if not self._busy.acquire(blocking=False):
            raise StoreError("the store is already being verified, compacted or purged: try again when that is done")
        try:
            return self._jobs[name](body)
        finally:
            self._busy.release()

    def _tell_backlog(self) -> _Answer:
        n_bytes = self._journal.bytes_after(self._loader.position)
        return {"journal_bytes_not_loaded": n_bytes, "seconds": self._backlog.seconds()}

    def _verify(self, body: Mapping[str, Any]) -> _Answer:
        self._loader.wait_for(self._journal.end(), _BARRIER_S)
        with contextlib.suppress(duckdb.Error):  # what cannot be read for it, `verify` names
            self._loader.cover_keys()
        with self._readers.snapshot(self._database) as snapshot:
            return verify(self._store, snapshot.cursor, self._journal, self._index, up_to_seq=snapshot.watermark)

    def _stats(self, body: Mapping[str, Any]) -> _Answer:
        self._loader.wait_for(self._journal.end(), body.get("wait_ms", 1000 * _BARRIER_S) / 1000)
        backlog = self._journal.bytes_after(self._loader.position)
        with self._readers.snapshot(self._database) as snapshot:
            answer = figures(self._store, snapshot.cursor, self._journal, self._loader.batcher_peak_bytes)
        return answer | {"journal_bytes_not_loaded": backlog}

    def _compact(self, body: Mapping[str, Any]) -> _Answer:
        before = self._bytes()
        rows = self._rewrite(lambda cursor: None)
        return {"rows": rows, "bytes_before": before, "bytes": self._bytes()}

    def _purge(self, body: Mapping[str, Any]) -> _Answer:
        criteria = _criteria(body)
        self._load_everything()
        with self._readers.snapshot(self._database) as snapshot:
            selection = select(snapshot.cursor, criteria)
            chosen = _count(snapshot.cursor, selection)
        answer: _Answer = {
            "rows": chosen,
            "traces": len(selection.trace_ids),
            "rollouts": selection.rollouts.num_rows,
            "trace_ids": selection.trace_ids,
            "rollout_ids": selection.rollouts["rollout_id"].to_pylist(),
            "labeled": selection.labeled.num_rows if criteria.before_ns is not None else 0,
        }
        if body.get("dry_run") or not (any(chosen.values()) or self._quarantined(selection)):
            return {**answer, "purged": False}
        self._rewrite(lambda cursor: selection)
        removed = self._remove_copies(selection)
        log.warning("purged traces=%d rows=%s", len(selection.trace_ids), chosen)
        return {**answer, "purged": True, **self._proof(selection), "files_removed": removed}

    def _rewrite(self, choose: Callable[[Any], TraceSelection | None]) -> dict[str, int]:
        """Replaces the store with a file without the chosen rows; returns the number of rows in it, by table."""
        end = self._load_everything()
        with self._readers.snapshot(self._database) as snapshot:
            rewriting = Rewriting(self._store, choose(snapshot.cursor), memory_bytes=self._memory_bytes)
        with contextlib.closing(rewriting), self._replaced_rows.paused():
            with self._readers.snapshot(self._database) as snapshot:
                rewriting.copy(snapshot.cursor, snapshot.watermark)

            def take_its_place() -> None:
                progress = self._database.progress()
                rewriting.copy(self._database.cursor(), progress.last_seq)
                rewriting.finish(progress)
                with self._database.writing, self._readers.alone(_READER_GRACE_S, _READER_END_S):
                    self._database.replace_with(rewriting.path)
                self._index.clear()
                self._journal.release(max(end, progress.position))

            self._loader.between_loads(take_its_place)
        return rewriting.rows

    def _load_everything(self) -> Any:
        """Waits until everything acknowledged so far is in DuckDB; returns its end in the journal."""
        end = self._journal.roll()
        if not self._loader.wait_for(end, _LOAD_WAIT_S):
            raise StoreError(f"not everything was loaded after {_LOAD_WAIT_S:.0f} s: see `trainspan store stats`")
        return end

    def _remove_copies(self, selection: TraceSelection) -> list[str]:
        """Deletes damaged write-ahead logs, and quarantined requests that contain purged ids."""
        removed = [*self._store.parent.glob(f"{self._store.name}.wal.damaged-*"), *self._quarantined(selection)]
        for path in removed:
            path.unlink()
        return list(map(str, removed))

    def _quarantined(self, selection: TraceSelection) -> list[Path]:
        """The quarantined requests that contain one of the selected traces' ids."""
        wanted = frozenset(needles(selection.trace_ids))
        quarantined = self._store.with_name(f"{self._store.name}.quarantine").glob("*.pb")
        return [path for path in quarantined if find_id(path, wanted)]

    def _proof(self, selection: TraceSelection) -> _Answer:
        """Searches for the purged rows with SQL, and for their ids in the bytes of every file of the store."""
        with self._readers.snapshot(self._database) as snapshot:
            left = _count(snapshot.cursor, selection)
        wanted = needles(selection.trace_ids, _MOST_IDS_SEARCHED)
        files = [self._store, *self._journal.files(), self._store.with_name(f"{self._store.name}.wal")]
        hits = [str(path) for path in files if path.exists() and find_bytes(path, wanted)]
        return {"rows_left": left, "ids_searched": len(wanted) // 2, "files_searched": len(files), "found_in": hits}

    def _bytes(self) -> int:
        return self._store.stat().st_size + self._database.wal_bytes()


def _criteria(body: Mapping[str, Any]) -> Criteria:
    if unknown := set(body) - {"trace_ids", "task_id", "before_ns", "dry_run"}:
        raise UsageError(
            f"purge has no parameter {min(unknown)!r}; parameters are trace_ids, task_id, before_ns and dry_run"
        )
    return Criteria(tuple(body.get("trace_ids") or ()), body.get("task_id"), body.get("before_ns"))


def _count(cursor: Any, selection: TraceSelection) -> dict[str, int]:
    selection.register(cursor)
    counts: dict[str, int] = {}
    for table in _TABLES:
        query = f"SELECT count(*) FROM stored.{table} WHERE {GONE}"
        [(counts[table],)] = cursor.execute(query, selection.parameters).fetchall()
    return counts
