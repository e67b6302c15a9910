"""The order of spans, their number of copies, and which of two stores holds them change nothing."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.processing.conftest import RunningCollector
from tests.processing.support.traces import START_NS, TestRollout, chain
from trainspan_collector.query.named_reads import READS
from trainspan_processing.assembly.chunks import assemble
from trainspan_processing.assembly.rows import RowCounts, make_rows
from trainspan_processing.dataset.files import LocalFiles
from trainspan_processing.dataset.ledger import LEDGER, DatasetLedger
from trainspan_processing.read.engine import OneProcess
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import SPAN_KEY
from trainspan_processing.traces.trace_index import Clock
from trainspan_schemas.config.settings import DatasetSettings

_RUN = "run-arrivals"
_CLOCK = Clock(lambda: START_NS + 10**13, lambda _: None)


class _Stores(Source):
    """Two stores with the given rows; reads return rows in that order, in batches."""

    def __init__(self, held: dict[str, pl.DataFrame], batch: int) -> None:
        super().__init__(["one", "two"])
        self._held, self._batch = held, batch

    def read(
        self, name: str, selection: Selection, columns: Sequence[str], *, store: int | None = None, **more: object
    ) -> Iterator[pl.DataFrame]:
        if name in ("records", "foreign"):  # nobody sent log records, and each row states its run
            return
        rows = self._held["others" if more.get("without_calls") else name]
        if store is not None:
            rows = rows.filter(pl.col("store") == store)
        if selection.rollout_ids is not None:
            rows = rows.filter(pl.col("rollout_id").is_in(list(selection.rollout_ids)))
        yield from rows.select(*columns, "store").iter_slices(self._batch)

    def query(self, sql: str) -> Iterator[pl.DataFrame]:
        yield from ()

    def tokens(self, store: int, seqs: Sequence[int], columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        rows = self._held["calls"].filter(pl.col("store") == store, pl.col("seq").is_in(list(seqs)))
        yield from rows.select(columns).iter_slices(self._batch)

    def attributes(self, spans: pl.DataFrame) -> Iterator[pl.DataFrame]:
        rows = self._held["spans"].join(spans, on=["store", "seq"], how="semi")
        yield from rows.select(*SPAN_KEY, "attributes").unique().iter_slices(self._batch)


def _dataset(source: Source) -> pl.DataFrame:
    chosen, counts = DatasetSettings(credit="return_to_go", baseline="rloo", min_coverage=0.0), RowCounts()
    with TemporaryDirectory() as folder:
        made = assemble(
            OneProcess(),
            source,
            Selection(_RUN),
            chosen,
            DatasetLedger(pl.DataFrame(schema=LEDGER)),
            _CLOCK,
            LocalFiles(Path(folder)),
        )
        chunks = (chunk for file in made.files() for chunk in file.chunks(source, made.folder))
        return pl.concat([rows for rows, _ in make_rows(chunks, made.limits, counts)])


def _workload() -> list[TestRollout]:
    made = [
        chain(TestRollout(f"{number}", run=_RUN, task=f"t{number % 2}"), 1 + number).reward(number / 4)
        for number in range(4)
    ]
    for made_before, rollout in enumerate(made[:2], start=1):
        tool = rollout.span("tool", 1.6, 1.9, gen_ai__operation__name="execute_tool")
        rollout.reward(0.125, on=tool, at=1.8)
        client = rollout.span("client", 5.0, 6.0, gen_ai__operation__name="chat", gen_ai__request__model="policy")
        rollout.call(made_before, [8], [9], at=5.0, parent=client, agent="second")
        rollout.call(made_before + 1, [8, 9], [9], at=7.0, agent="second")
    return made


@pytest.fixture(scope="module")
def recorded(collectors: list[RunningCollector]) -> dict[str, pl.DataFrame]:
    """Every row of the workload as returned by a real store."""
    collectors[0].send(_workload())
    with Source([str(collectors[0].store)]) as source:
        reads = {"spans": "spans", "others": "spans", "calls": "calls", "evaluations": "evaluations"}
        rows = {
            name: pl.concat(
                source.read(read, Selection(_RUN), READS[read], **({"without_calls": True} if name == "others" else {}))
            )
            for name, read in reads.items()
        }
    return {**rows, "holdings": pl.concat([_held(rows["calls"], "calls"), _held(rows["others"], "spans")])}


def _held(rows: pl.DataFrame, kind: str) -> pl.DataFrame:
    """The read `holdings` for these rows, one row per span."""
    return rows.select(
        *("store", *SPAN_KEY, "rollout_id", "attempt", "run_id", "round", "task_id"),
        *(pl.lit(int(kind == name)).alias(name) for name in ("calls", "spans")),
        *(pl.col("seq").alias(name) for name in ("first_seq", "last_seq")),
        pl.lit(value=True).alias("is_selected"),
    )


@pytest.mark.ci
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_order_duplicates_and_stores_change_no_row(recorded: dict[str, pl.DataFrame], data: st.DataObject) -> None:
    expected = _dataset(_Stores(recorded, 1_000))
    assert expected.height == 14
    held: dict[str, pl.DataFrame] = {}
    whole = recorded["spans"].height
    stores = data.draw(st.lists(st.sampled_from([(0,), (1,), (0, 1)]), min_size=whole, max_size=whole))
    keys = recorded["spans"].select(SPAN_KEY).with_columns(pl.Series("stores", stores, dtype=pl.List(pl.UInt8)))
    for name, rows in recorded.items():
        spread = rows.drop("store").join(keys, on=SPAN_KEY, how="left").explode("stores").rename({"stores": "store"})
        order = data.draw(st.permutations(range(spread.height)))
        held[name] = spread[list(order)]
    assert _dataset(_Stores(held, data.draw(st.integers(1, 9)))).equals(expected)
