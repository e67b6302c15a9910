"""The cost of loading into a large store: CPU of a batch of 2,048 spans at each store size, for new and for repeated spans.

The least favorable batch repeats spans from all over the store, as an exporter that sends old spans again, or an attacker, does.
The spans of benchmarks/collector/collector.py are loaded; the others are inserted by SQL with little more than their ids, since only
ids are looked up. `TRAINSPAN_BENCH_STORED` sets other sizes.
"""

import os
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

import pyarrow as pa

from benchmarks.support.export_requests import SPANS_PER_REQUEST, requests
from tests.support.collector.filling import Filling
from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.journal.segments import LoadProgress, Position
from trainspan_collector.rows.batch import Batch, Tables
from trainspan_collector.rows.tables import ROW_GROUP_ROWS
from trainspan_collector.store.database import Database
from trainspan_collector.store.insert import load

__all__ = ["measure"]

_SIZES: Final = "250_000,1_000_000,2_000_000"
_ROUNDS: Final = 12
_POOREST, _RICHEST = 0, 2**63 - 1
_AT_ONCE: Final = 1_000_000
_BODIES: Final = requests(0)
_MEMORY_BYTES: Final = 144 * 2**20  # the default of duckdb_memory_bytes


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of stored spans, in a batch whose other spans are new."""

    n_spans: int
    richness: int


_UNFAVORABLE: Final = {
    "sent_again_from_all_over": Copies(ROW_GROUP_ROWS, _POOREST),
    "replacing_all_over": Copies(ROW_GROUP_ROWS, _RICHEST),
    "one_sent_again": Copies(1, _POOREST),  # the batch no longer fills a row group
}


def measure() -> dict[str, Any]:
    """Figures at each size."""
    sizes = [int(text) for text in os.environ.get("TRAINSPAN_BENCH_STORED", _SIZES).split(",")]
    with tempfile.TemporaryDirectory(prefix="trainspan-bench-") as folder:
        database = Database(Path(folder) / "spans.duckdb", memory_bytes=_MEMORY_BYTES)
        with closing(database), closing(Filling(database, Path(folder) / "keys")) as filling:
            figures = {f"at_{size}": _at(filling, database, Path(folder), size) for size in sizes}
    return figures


def _at(filling: Filling, database: Database, folder: Path, size: int) -> dict[str, Any]:
    stored = filling.last_seq
    began_cpu, began = time.process_time(), time.monotonic()
    while filling.last_seq < size:
        filling.add_many(min(_AT_ONCE, size - filling.last_seq))
    database.checkpoint()
    filling_us = 1e6 * (time.process_time() - began_cpu) / max(1, filling.last_seq - stored)
    filling_s = time.monotonic() - began
    filling.index.clear()
    began_cpu, began = time.process_time(), time.monotonic()
    filling.index.cover(filling.cursor)
    made_us = 1e6 * (time.process_time() - began_cpu) / max(1, filling.last_seq)
    made_s = time.monotonic() - began
    memory_mib = _memory_mib()
    rounds = [_round(filling, database, size, number) for number in range(_ROUNDS)]
    new, recent, *old = (median(costs) for costs in zip(*rounds, strict=True))
    return {
        "new_us_per_span": round(new, 1),
        "sent_again_at_once_us_per_span": round(recent, 1),
        **{f"{name}_us_per_span": round(cost, 1) for name, cost in zip(_UNFAVORABLE, old, strict=True)},
        "worst_ratio_to_new": round(max(recent, *old) / new, 2),
        "index_rebuild_us_per_span": round(made_us, 2),
        "index_rebuild_s": round(made_s, 1),
        "filled_us_per_span": round(filling_us, 2),
        "filled_s": round(filling_s, 1),
        "index_bytes_per_span": round(
            sum(path.stat().st_size for path in (folder / "keys").iterdir()) / filling.last_seq, 1
        ),
        "memory_mib": memory_mib,
    }


def _round(filling: Filling, database: Database, size: int, number: int) -> list[float]:
    """The costs of a batch of new spans, of the same again, and of each of _UNFAVORABLE.

    They take turns, so that other work on the machine hits all of them.
    """
    tables = _tables(filling)
    costs = [_load(filling, tables), _load(filling, tables)]
    costs += [_load(filling, _with_copies(filling, size, number, copies)) for copies in _UNFAVORABLE.values()]
    database.checkpoint()
    return costs


def _tables(filling: Filling) -> Tables:
    """A batch of one row group with new ids."""
    batch = Batch(filling.last_seq)
    for body in islice(_BODIES, ROW_GROUP_ROWS // SPANS_PER_REQUEST):
        batch.add(Frame(Signal.TRACES, 1, body, 0))
    filling.last_seq = batch.last_seq
    return batch.tables()


def _load(filling: Filling, tables: Tables) -> float:
    """Microseconds of CPU per span, including RocksDB's threads but not the checkpoint."""
    began = time.process_time()
    filling.index.cover(filling.cursor)
    load(filling.cursor, filling.index, filling.row_groups, tables, LoadProgress(Position(1, 1), filling.last_seq))
    return 1e6 * (time.process_time() - began) / tables.n_spans


def _with_copies(filling: Filling, size: int, number: int, copies: Copies) -> Tables:
    """A batch with copies of stored spans from all over the store; each `number` has others."""
    step = size // ROW_GROUP_ROWS
    place = number * step // _ROUNDS
    query = f"FROM stored.live_spans WHERE seq % {step} = {place} AND seq <= {size} LIMIT {copies.n_spans}"
    stored = filling.cursor.sql(query).to_arrow_table()
    tables = _tables(filling)
    assert tables.spans is not None
    again, others = tables.spans.slice(0, stored.num_rows), tables.spans.slice(stored.num_rows)
    for name in ("span_key", "trace_id", "span_id"):
        column = again.schema.get_field_index(name)
        again = again.set_column(column, name, stored[name].cast(again.schema.field(name).type))
    richness = pa.repeat(copies.richness, stored.num_rows).cast(pa.int64())
    again = again.set_column(again.schema.get_field_index("richness"), "richness", richness)
    return Tables(pa.concat_tables([again, others]), None, None, 0, tables.tally)


def _memory_mib() -> int:
    """Memory of this process without mapped files."""
    with open("/proc/self/status") as status:
        [kib] = [int(line.split()[1]) for line in status if line.startswith("RssAnon:")]
    return kib >> 10
