"""Reading a store piece by piece: locations of rollouts, reads restricted to them, and tokens by location."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest

from tests.collector.query.test_scoped_views import MEMORY_BYTES, most_rows, stores, tangle
from tests.support.filling import Filling
from trainspan_collector.query import named_reads
from trainspan_collector.query.named_reads import HOLDINGS, NEWEST, READS, TOKENS, named_read
from trainspan_collector.store.database import Database
from trainspan_processing.read import locations
from trainspan_processing.read.locations import RolloutLocations
from trainspan_schemas.errors import UsageError

__all__ = ["stores"]

PLACED = ("spans", "calls", "evaluations")
SELECTIONS: list[dict[str, object]] = [{}, {"run_id": "a"}, {"round": 1}, {"round": 1, "run_id": "b"}]


def _rows(database: Database, name: str, **parameters: object) -> list[str]:
    query = named_read(name, parameters)
    return sorted(map(repr, database.cursor().sql(query.sql, params=query.parameters).fetchall()))


def _held(database: Database, **selection: object) -> pl.DataFrame:
    query = named_read("holdings", selection)
    held = database.cursor().sql(query.sql, params=query.parameters).to_arrow_table()
    return pl.DataFrame(pl.from_arrow(held)).with_columns(pl.lit(0, dtype=pl.UInt8).alias("store"))


@pytest.fixture(autouse=True)
def _tight_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small stores are split like large ones."""
    monkeypatch.setattr(named_reads, "_STRETCH", 3)
    monkeypatch.setattr(locations, "_NEAR_SEQS", 1)


def _differing(folder: Path, random: Random) -> Iterator[Mapping[str, Any]]:
    """Yields reads that return different rows if restricted to locations, and {} for each that skips half the store."""
    path = folder / f"{random.random()}.duckdb"
    database = Database(path, memory_bytes=MEMORY_BYTES)
    filling = Filling(database, path.with_suffix(".keys"))
    tangle(random, filling)
    inventories = [(selection, _held(database, **selection)) for selection in SELECTIONS]
    seen = filling.last_seq
    for more in (False, True):
        if more:
            tangle(random, filling)
        for selection, held in inventories:
            places = RolloutLocations.of(held, {0: seen})
            known = held.filter("is_selected")["rollout_id"].unique().sort().to_list()
            for _ in range(2):
                ids = random.sample(known, min(len(known), random.choice((1, 2, 5))))
                told = places.parameters(0, ids)
                looked_at = sum(last - first + 1 for first, last in told["spans_within"])  # type: ignore[attr-defined]
                for name in PLACED:
                    chosen = {**selection, "rollout_ids": ids}
                    if _rows(database, name, **chosen, **told) != _rows(database, name, **chosen):
                        yield {"name": name, **chosen, **told, "more": more}
                    elif looked_at < seen // 2:
                        yield {}
    filling.close()
    database.close()


def test_reads_that_know_where_to_look_give_the_same_rows_and_what_came_since(tmp_path: Path) -> None:
    told = list(_differing(tmp_path, Random(11)))
    assert [case for case in told if case] == []
    assert len(told) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_reads_that_know_where_to_look_give_the_same_rows_in_forty_stores(tmp_path: Path) -> None:
    for seed in range(20, 60):
        assert [case for case in _differing(tmp_path, Random(seed)) if case] == [], seed


@pytest.fixture(scope="module")
def tangled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    folder = tmp_path_factory.mktemp("held")
    database = Database(folder / "s.duckdb", memory_bytes=MEMORY_BYTES)
    with closing(Filling(database, folder / "keys")) as filling:
        tangle(Random(3), filling)
    yield database
    database.close()


@pytest.mark.parametrize("selection", SELECTIONS)
def test_holdings_count_what_the_reads_of_calls_and_spans_give(tangled: Database, selection: dict[str, object]) -> None:
    key = ["rollout_id", "attempt", "trace_id", "run_id", "round", "task_id"]
    found: dict[tuple[Any, ...], dict[str, int]] = {}
    for name, more in (("calls", {}), ("spans", {"without_calls": True})):
        query = named_read(name, {**selection, **more, "columns": key})
        for row in tangled.cursor().sql(query.sql, params=query.parameters).fetchall():
            if row[0] is not None:
                found.setdefault(row, {"calls": 0, "spans": 0})[name] += 1
    held = _held(tangled, **selection).filter("is_selected")
    counted = held.group_by(key).agg(pl.col("calls", "spans").sum())
    assert {row[:6]: {"calls": row[6], "spans": row[7]} for row in counted.iter_rows()} == found
    assert len(found) > 5
    query = named_read("spans", {**selection, "columns": ["seq", "rollout_id"]})
    for seq, rollout_id in tangled.cursor().sql(query.sql, params=query.parameters).fetchall():
        assert (
            rollout_id is None
            or held.filter(pl.lit(seq).is_between("first_seq", "last_seq"), rollout_id=rollout_id).height
        )


def test_tokens_are_read_by_their_place(tangled: Database) -> None:
    columns = list(TOKENS)
    query = named_read("calls", {"columns": ["seq", *columns]})
    calls = tangled.cursor().sql(query.sql, params=query.parameters).fetchall()
    wanted = calls[::2]
    assert len(wanted) > 5
    assert _rows(tangled, "tokens", seqs=[row[0] for row in wanted]) == sorted(repr(row[1:]) for row in wanted)
    assert _rows(tangled, "tokens", seqs=[]) == _rows(tangled, "tokens", seqs=[10**9]) == []
    [(spans_only,)] = tangled.cursor().execute("SELECT min(seq) FROM stored.spans WHERE NOT is_call").fetchall()
    assert _rows(tangled, "tokens", seqs=[spans_only]) == []
    assert _rows(tangled, "tokens", seqs=[wanted[0][0]], columns=["span_id"]) == [repr((wanted[0][2],))]


def test_the_newest_rows_are_those_that_arrived_last(tangled: Database) -> None:
    cursor, last_seq = tangled.cursor(), tangled.progress().last_seq
    wanted = (
        f"SELECT seq, rollout_id, left(task_id, 300), rollout_status FROM stored.live_spans WHERE seq > {last_seq} - 30"
    )
    query = named_read("newest", {"rows": 30, "columns": ["seq", "rollout_id", "task_id", "rollout_status"]})
    found = cursor.sql(query.sql, params=query.parameters).fetchall()
    assert found == cursor.sql(f"{wanted} ORDER BY seq DESC").fetchall()
    assert 5 < len(found) <= 30


def test_a_rollout_that_was_not_counted_is_looked_for_everywhere(tangled: Database) -> None:
    places = RolloutLocations.of(_held(tangled), {0: 10**6})
    assert places.parameters(0, ["nobody"]) == {}
    assert places.parameters(1, ["r1"]) == {}
    assert set(places.parameters(0, ["r1"])) == {"spans_within", "seen_seq"}


def test_ranges_are_few_and_keep_the_widest_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    held = pl.DataFrame(
        {
            "store": pl.Series([0] * 6, dtype=pl.UInt8),
            "rollout_id": ["a"] * 6,
            "trace_id": ["t"] * 6,
            "first_seq": [1, 100, 105, 400, 390, 1000],
            "last_seq": [10, 101, 110, 401, 500, 1000],
        }
    )
    places = RolloutLocations.of(held, {0: 2000})
    assert places.parameters(0, ["a"])["spans_within"] == [[1, 10], [100, 101], [105, 110], [390, 500], [1000, 1000]]
    monkeypatch.setattr(locations, "_MOST_RANGES", 3)
    assert places.parameters(0, ["a"])["spans_within"] == [[1, 110], [390, 500], [1000, 1000]]


@pytest.mark.parametrize("name", PLACED)
def test_a_store_of_ten_times_the_size_gives_such_a_read_no_more_to_join(
    stores: tuple[Database, Database], name: str
) -> None:
    ids = ["r7", "r8", "r9"]
    found = []
    for store in stores:
        places = RolloutLocations.of(_held(store), {0: store.progress().last_seq}).parameters(0, ids)
        found.append(most_rows(store, name, {"rollout_ids": ids, **places}))
    assert 0 < found[1] <= 1.2 * found[0] < 1_000


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("tokens", {}, "seqs"),
        ("tokens", {"seqs": ["1"]}, "list of integers"),
        ("tokens", {"seqs": [True]}, "list of integers"),
        ("tokens", {"seqs": [1], "columns": ["attributes"]}, "no column 'attributes'"),
        ("tokens", {"seqs": [1], "run_id": "a"}, "no parameter 'run_id'"),
        ("holdings", {"without_calls": True}, "no parameter 'without_calls'"),
        ("newest", {"rows": 0}, "not between 1 and 10000"),
        ("newest", {"round": 1}, "no parameter 'round'"),
        ("calls", {"task_id": "t"}, "no parameter 'task_id'"),
        ("spans", {"rollout_ids": ["a"], "seen_seq": 1}, "must be given together"),
        ("spans", {"spans_within": [], "seen_seq": 1}, "must be given together"),
        ("spans", {"rollout_ids": ["a"], "spans_within": [], "seen_seq": 1, "since_seq": 1}, "without since_seq"),
        ("spans", {"rollout_ids": ["a"], "spans_within": [[1, "2"]], "seen_seq": 1}, "ranges"),
        ("rollouts", {"rollout_ids": ["a"], "spans_within": [], "seen_seq": 1}, "no parameter 'spans_within'"),
    ],
)
def test_what_such_a_read_does_not_know_is_said(name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named_read(name, parameters)


def test_the_columns_are_those_promised(tangled: Database) -> None:
    for name, columns, parameters in (
        ("holdings", HOLDINGS, {}),
        ("tokens", TOKENS, {"seqs": [1]}),
        ("newest", tuple(NEWEST), {}),
    ):
        query = named_read(name, parameters)
        assert tuple(tangled.cursor().sql(query.sql, params=query.parameters).columns) == columns
    assert not {"holdings", "tokens", "newest"} & set(READS)
