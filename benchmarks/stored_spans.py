"""The cost of loading into a large store: CPU of a batch of 2,048 spans at each store size, for new and for repeated spans.

The spans of benchmarks/collector.py are loaded; the others are inserted by SQL with little more than their ids, since only
ids are looked up. `TRAINSPAN_BENCH_STORED` sets other sizes.
"""

import os
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.support.export_requests import SPANS_PER_REQUEST, requests
from tests.support.filling import Filling
from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.journal.segments import Position, Progress
from trainspan_collector.rows.batch import Batch, Tables
from trainspan_collector.rows.tables import ROW_GROUP_ROWS
from trainspan_collector.store.database import Database
from trainspan_collector.store.insert import load

__all__ = ["measure"]

_SIZES: Final = "1_000_000,10_000_000"
_BATCHES: Final = 16
_AT_ONCE: Final = 1_000_000
_BODIES: Final = requests(0)
_MEMORY_BYTES: Final = 144 * 2**20  # the default of duckdb_memory_bytes


def measure() -> dict[str, Any]:
    """Figures at each size, and their ratios to the cost at a million stored spans."""
    sizes = [int(text) for text in os.environ.get("TRAINSPAN_BENCH_STORED", _SIZES).split(",")]
    with tempfile.TemporaryDirectory(prefix="trainspan-bench-") as folder:
        database = Database(Path(folder) / "spans.duckdb", memory_bytes=_MEMORY_BYTES)
        with closing(database), closing(Filling(database, Path(folder) / "keys")) as filling:
            figures = {f"at_{size}": _at(filling, database, Path(folder), size) for size in sizes}
    new = {size: figures[f"at_{size}"]["new_us_per_span"] for size in sizes}
    if len(sizes) > 1 and 1_000_000 in new:
        figures["ratio_to_a_million"] = {str(size): round(cost / new[1_000_000], 2) for size, cost in new.items()}
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
    batches = [_tables(filling) for _ in range(_BATCHES)]
    new = [_load(filling, tables) for tables in batches]
    database.checkpoint()
    recent = [_load(filling, tables) for tables in batches[-4:]]
    old = [_load_old(filling, size) for _ in range(4)] if size else []
    return {
        "new_us_per_span": round(median(new), 1),
        "sent_again_at_once_us_per_span": round(median(recent), 1),
        "sent_again_from_all_over_us_per_span": round(median(old), 1) if old else None,
        "index_made_anew_us_per_span": round(made_us, 2),
        "index_made_anew_s": round(made_s, 1),
        "filled_us_per_span": round(filling_us, 2),
        "filled_s": round(filling_s, 1),
        "index_bytes_per_span": round(
            sum(path.stat().st_size for path in (folder / "keys").iterdir()) / filling.last_seq, 1
        ),
        "memory_mib": memory_mib,
    }


def _tables(filling: Filling) -> Tables:
    """A batch of one row group with new ids."""
    batch = Batch(filling.last_seq)
    for body in islice(_BODIES, ROW_GROUP_ROWS // SPANS_PER_REQUEST):
        batch.add(Frame(Signal.TRACES, 1, body, 0))
    filling.last_seq = batch.last_seq
    return batch.tables()


def _load(filling: Filling, tables: Tables) -> float:
    """Microseconds of CPU per span, including RocksDB's threads."""
    began = time.process_time()
    filling.index.cover(filling.cursor)
    load(filling.cursor, filling.index, filling.row_groups, tables, Progress(Position(1, 1), filling.last_seq))
    return 1e6 * (time.process_time() - began) / tables.n_spans


def _load_old(filling: Filling, size: int) -> float:
    """The same for copies of stored spans that are far apart."""
    step = size // ROW_GROUP_ROWS
    rows = filling.cursor.sql(f"FROM stored.spans WHERE seq % {step} = {step // 2} AND seq <= {size}").to_arrow_table()
    tables = _tables(filling)
    assert tables.spans is not None
    n_rows = min(rows.num_rows, tables.spans.num_rows)
    spans = tables.spans.slice(0, n_rows)
    for name in ("span_key", "trace_id", "span_id"):
        index = spans.schema.get_field_index(name)
        spans = spans.set_column(index, name, rows[name].slice(0, n_rows).cast(spans.schema.field(name).type))
    return _load(filling, Tables(spans, None, None, 0, tables.tally))


def _memory_mib() -> int:
    """Memory of this process without mapped files."""
    with open("/proc/self/status") as status:
        [kib] = [int(line.split()[1]) for line in status if line.startswith("RssAnon:")]
    return kib >> 10
