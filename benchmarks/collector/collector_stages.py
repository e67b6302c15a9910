"""The collector's time by stage: each stage of a span's processing alone, in one process, in microseconds of CPU per span.

The same requests as in benchmarks/collector/collector.py: decode (the receiver's check), journal (checksum and write), its sync (wall
time), rows (decode again, read attributes), Arrow, hand over (from the row process), insert (duplicate lookup,
compression) and commit, checkpoint.
"""

import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from benchmarks.support.export_requests import SPANS_PER_REQUEST, requests
from trainspan_collector.journal.frames import Frame, Signal, encode_header, new_marker
from trainspan_collector.journal.segments import LoadProgress, Position
from trainspan_collector.load.batcher_worker import write_table
from trainspan_collector.otlp.signals import TRACES
from trainspan_collector.rows.batch import Batch
from trainspan_collector.rows.tables import ROW_GROUP_ROWS
from trainspan_collector.store.database import Database
from trainspan_collector.store.insert import load
from trainspan_collector.store.key_index import KeyIndex

__all__ = ["measure"]

_GROUP = 8
"""Requests per write and sync of the journal, about as with four connections."""
_N_REQUESTS = 12 * ROW_GROUP_ROWS // SPANS_PER_REQUEST


class Stages:
    """CPU seconds by stage."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.process_time() - began


def measure() -> dict[str, Any]:
    """Measures `stage_us` per span, the sum, and DuckDB's memory at the end."""
    with tempfile.TemporaryDirectory(prefix="trainspan-bench-") as folder:
        return _measure(Path(folder))


def _measure(folder: Path) -> dict[str, Any]:
    stages = Stages()
    bodies = [bytes(body) for body, _ in zip(requests(0), range(_N_REQUESTS), strict=False)]
    n_spans = len(bodies) * SPANS_PER_REQUEST
    with stages.stage("decode"):
        for body in bodies:
            TRACES.parse(body)
    sync_s = _journal(folder / "journal", bodies, stages)
    database = Database(folder / "spans.duckdb", memory_bytes=2**28)
    cursor, index, groups = database.cursor(), KeyIndex(folder / "keys"), database.row_groups()
    gathered = Batch(0)
    with tempfile.TemporaryFile() as shared:
        for number, body in enumerate(bodies, start=1):
            with stages.stage("rows"):
                gathered.add(Frame(Signal.TRACES, 1, body, 0))
            if gathered.n_spans >= ROW_GROUP_ROWS:
                with stages.stage("arrow"):
                    tables = gathered.tables()
                with stages.stage("hand over"):
                    tables = replace(tables, spans=_handed_over(tables.spans, shared))
                with stages.stage("insert and commit"):
                    index.cover(cursor)
                    load(cursor, index, groups, tables, LoadProgress(Position(1, number), gathered.last_seq))
                gathered = Batch(gathered.last_seq)
    with stages.stage("checkpoint"):
        database.checkpoint()
    [(duckdb_bytes,)] = cursor.execute("SELECT sum(memory_usage_bytes)::BIGINT FROM duckdb_memory()").fetchall()
    store_bytes = (folder / "spans.duckdb").stat().st_size
    index.close()
    database.close()
    stage_us = {name: round(1e6 * seconds / n_spans, 1) for name, seconds in stages.cpu_s.items()}
    return {
        "stage_us_per_span": {**stage_us, "sync (wall)": round(1e6 * sync_s / n_spans, 1)},
        "stages_together_us_per_span": round(sum(stage_us.values()), 1),
        "stored_bytes_per_call": round(store_bytes / n_spans),
        "duckdb_memory_mib": duckdb_bytes >> 20,
    }


def _handed_over(table: pa.Table, shared: BinaryIO) -> pa.Table:
    """The table as received from the row process."""
    shared.seek(0)
    write_table(shared, table)
    shared.flush()
    return pa.ipc.open_stream(pa.py_buffer(mmap.mmap(shared.fileno(), 0, access=mmap.ACCESS_READ))).read_all()


def _journal(path: Path, bodies: list[bytes], stages: Stages) -> float:
    """Writes the requests in groups, each with one sync; returns the seconds of the syncs."""
    sync_s, marker = 0.0, new_marker()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for start in range(0, len(bodies), _GROUP):
        with stages.stage("journal"):
            parts = [
                part
                for body in bodies[start : start + _GROUP]
                for part in (marker, encode_header(Signal.TRACES, 1, body), body)
            ]
            os.writev(file, parts)
        began = time.monotonic()
        with stages.stage("sync"):
            os.fdatasync(file)
        sync_s += time.monotonic() - began
    os.close(file)
    path.unlink()
    return sync_s


def limits(folder: Path) -> dict[str, Any]:
    """The machine's limits: syncs per second after small and large writes, MiB/s to disk and from memory to memory."""
    result: dict[str, Any] = {}
    for name, n_bytes in (("fdatasync_4_kib_per_s", 4096), ("fdatasync_512_kib_per_s", 512 * 1024)):
        descriptor = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        data, began, n_syncs = os.urandom(n_bytes), time.monotonic(), 0
        while time.monotonic() - began < 1:
            os.write(descriptor, data)
            os.fdatasync(descriptor)
            n_syncs += 1
        os.close(descriptor)
        result[name] = round(n_syncs / (time.monotonic() - began))
    data = os.urandom(2**26)
    descriptor, began = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), time.monotonic()
    for _ in range(4):
        os.write(descriptor, data)
    os.fdatasync(descriptor)
    result["disk_write_mib_per_s"] = round(256 / (time.monotonic() - began))
    os.close(descriptor)
    (folder / "probe").unlink()
    target, began = bytearray(len(data)), time.monotonic()
    for _ in range(8):
        target[:] = data
    result["memory_copy_mib_per_s"] = round(512 / (time.monotonic() - began))
    result["disk_free_gib"] = shutil.disk_usage(folder).free >> 30
    return result


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
