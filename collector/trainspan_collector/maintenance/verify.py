"""Checks that a store is whole: every block is readable, every key is unique, journal and files are as they should be."""

from pathlib import Path
from typing import Final

import duckdb

from trainspan_collector.journal.frames import Damage, Frame, scan_frames
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.segments import Position, marker_of
from trainspan_collector.maintenance.stats import store_files
from trainspan_collector.store.duckdb_errors import first_line
from trainspan_collector.store.insert import lacking_places
from trainspan_collector.store.key_index import KeyIndex, KeyIndexError

__all__ = ["verify"]

_TABLES: Final = {
    "spans": "seq",
    "logs": "seq",
    "evaluations": "seq",
    "superseded": "*",
    "places": "*",
    "progress": "*",
}
"""Table → what is counted as its rows."""
_QUESTIONS: Final = {
    "duplicate spans": "SELECT count(*) - count(DISTINCT (trace_id, span_id)) FROM stored.live_spans WHERE collides IS NULL",
    "duplicate log records": "SELECT count(*) - count(DISTINCT content_hash) FROM stored.logs WHERE seq IS NOT NULL",
    "duplicate evaluations": "SELECT count(*) - count(DISTINCT key) FROM stored.live_evaluations",
    "duplicate row numbers": """
        SELECT count(seq) - count(DISTINCT seq) FROM
        (SELECT seq FROM stored.spans UNION ALL SELECT seq FROM stored.logs UNION ALL SELECT seq FROM stored.evaluations)""",
    "row numbers above the last one": """
        SELECT count(*) FROM
        (SELECT seq FROM stored.spans UNION ALL SELECT seq FROM stored.logs UNION ALL SELECT seq FROM stored.evaluations)
        WHERE seq > (SELECT last_seq FROM stored.progress)""",
    "spans whose key differs from their id": "SELECT count(*) FROM stored.spans WHERE printf('%016x', span_key) <> span_id",
    "places of traces and rollouts that are not known": lacking_places(),
    "calls without token ids": "SELECT count(*) FROM calls WHERE prompt_ids IS NULL AND completion_ids IS NULL",
}
"""What must not occur → SQL that counts it."""


def verify(
    store: Path, cursor: duckdb.DuckDBPyConnection, journal: Journal, index: KeyIndex, *, up_to_seq: int
) -> dict[str, object]:
    """`{"ok", "problems": [...], "rows": {...}, "journal_requests": n}`; reads every byte of the store once."""
    problems: list[str] = []
    rows: dict[str, int] = {}
    for table, counted in _TABLES.items():
        try:  # the hash of whole rows makes DuckDB read, and check the checksum of, every block
            query = f"SELECT count({counted}), bit_xor(hash(t)) FROM stored.{table} t"
            [(rows[table], _)] = cursor.execute(query).fetchall()
        except duckdb.Error as error:
            problems.append(f"table {table} cannot be read: {first_line(error)}")
    for words, query in _QUESTIONS.items():
        try:
            [(count,)] = cursor.execute(query).fetchall()
        except duckdb.Error as error:
            problems.append(f"{words}: cannot be counted: {first_line(error)}")
        else:
            if count:
                problems.append(f"{count} {words}")
    problems += _index(index, cursor, up_to_seq)
    n_requests, damage = _journal(journal)
    problems += damage
    for path in store_files(store):
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            problems.append(f"{path} can be read by others (mode {mode:o}): chmod 600 it")
    return {"ok": not problems, "problems": problems, "rows": rows, "journal_requests": n_requests}


def _index(index: KeyIndex, cursor: duckdb.DuckDBPyConnection, up_to_seq: int) -> list[str]:
    try:
        n_lacking, n_unknown = index.compare(cursor, up_to_seq)
    except (duckdb.Error, KeyIndexError) as error:
        return [f"the key index cannot be checked: {first_line(error)}"]
    counts = {"rows missing in the key index": n_lacking, "keys in the index of rows that are not stored": n_unknown}
    return [f"{count} {words}" for words, count in counts.items() if count]


def _journal(journal: Journal) -> tuple[int, list[str]]:
    """The number of intact requests in segments that are not being written, and the damage there."""
    n_requests, damage = 0, []
    journal.roll()
    for name, size in journal.segments_from(Position(0, 0)).values():
        try:
            data = (journal.folder / name).read_bytes()
        except FileNotFoundError:  # loaded and deleted meanwhile
            continue
        if name in journal.found_empty:
            damage.append(f"{name} is empty: it was truncated, or never written to")
        elif len(data) < size:
            damage.append(f"{name} has lost {size - len(data)} of its {size} bytes since it was written")
        for item in scan_frames(data, marker_of(name), complete=False):
            if isinstance(item, Frame):
                n_requests += 1
            elif isinstance(item, Damage):
                damage.append(f"{name}: bytes {item.start} to {item.end} are not an intact request")
    return n_requests, damage
