"""Statistics of a store: rows, bytes by file, bytes per call, ages."""

import resource
from pathlib import Path

import duckdb

from trainspan_collector.journal.journal import Journal
from trainspan_schemas.store.views import STORE_VERSION

__all__ = ["figures", "store_files"]

_COUNTED = {
    "spans": "stored.live_spans",
    "logs": "stored.live_logs",
    "calls": "stored.live_spans WHERE is_call",
    "evaluations": "stored.live_evaluations",
    "rollouts": "rollouts",
}
"""View → the same number of rows, without the joins that find the rollout of each."""


def figures(
    store: Path, cursor: duckdb.DuckDBPyConnection, journal: Journal, batcher_peak_bytes: int
) -> dict[str, object]:
    """Names → numbers. Sizes are in bytes, times in nanoseconds since 1970."""
    counts = {}
    for name, rows in _COUNTED.items():
        [(counts[name],)] = cursor.execute(f"SELECT count(*) FROM {rows}").fetchall()
    [(superseded,)] = cursor.execute("SELECT count(*) FROM stored.superseded").fetchall()
    [(traces, oldest, newest)] = cursor.execute(
        "SELECT count(DISTINCT trace_id), min(received_ns), max(received_ns) FROM stored.spans WHERE seq IS NOT NULL"
    ).fetchall()
    [(last_seq,)] = cursor.execute("SELECT last_seq FROM stored.progress").fetchall()
    [(block, n_blocks, n_free)] = cursor.execute(
        "SELECT block_size, total_blocks, free_blocks FROM pragma_database_size() WHERE database_name = 'store'"
    ).fetchall()
    [(duckdb_memory,)] = cursor.execute("SELECT sum(memory_usage_bytes)::BIGINT FROM duckdb_memory()").fetchall()
    used = (n_blocks - n_free) * block
    return {
        "store": str(store),
        "version": STORE_VERSION,
        **counts,
        "traces": traces,
        "superseded": superseded,
        "last_seq": last_seq,
        "oldest_received_ns": oldest,
        "newest_received_ns": newest,
        "store_bytes": _size(store),
        "store_bytes_free": n_free * block,
        "store_bytes_per_span": round(used / counts["spans"]) if counts["spans"] else None,
        "store_bytes_per_call": round(used / counts["calls"]) if counts["calls"] else None,
        "wal_bytes": _size(store.with_name(f"{store.name}.wal")),
        "journal_bytes": journal.n_bytes(),
        "key_index_bytes": sum(map(_size, store.with_name(f"{store.name}.keys").glob("*"))),
        "damaged_wal_bytes": sum(map(_size, store.parent.glob(f"{store.name}.wal.damaged-*"))),
        "quarantined_requests": len(list(store.with_name(f"{store.name}.quarantine").glob("*.pb"))),
        "duckdb_memory_bytes": duckdb_memory,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + batcher_peak_bytes,
    }


def store_files(store: Path) -> list[Path]:
    """Every file of the store: database, write-ahead logs, journal, quarantine, key index, address."""
    files = [path for path in store.parent.glob(f"{store.name}*") if path.is_file()]
    folders = [store.with_name(f"{store.name}.{name}") for name in ("journal", "quarantine", "keys")]
    return [*files, *(path for folder in folders for path in folder.glob("*") if path.is_file())]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
