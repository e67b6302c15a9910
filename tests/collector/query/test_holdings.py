"""Reading a store piece by piece: what it holds of each rollout, tokens by their number, and the newest rows."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from random import Random
from typing import Any

import duckdb
import polars as pl
import pytest

from tests.collector.query.test_scoped_views import MEMORY_BYTES, tangle
from tests.support.collector.filling import Filling
from trainspan_collector.query import named_reads
from trainspan_collector.query.named_reads import ACTIVITY, FOREIGN, HOLDINGS, NEWEST, READS, TEXTS, TOKENS, named_read
from trainspan_collector.query.places import RowPlaces
from trainspan_collector.store.database import Database
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys

SELECTIONS: list[dict[str, object]] = [{}, {"run_id": "a"}, {"round": 1}, {"round": 1, "run_id": "b"}]


def _query(database: Database, name: str, **parameters: object) -> duckdb.DuckDBPyRelation:
    cursor = database.cursor()
    query = named_read(name, parameters, RowPlaces(cursor))
    return cursor.sql(query.sql, params=query.parameters)


def _rows(database: Database, name: str, **parameters: object) -> list[str]:
    return sorted(map(repr, _query(database, name, **parameters).fetchall()))


def _held(database: Database, **selection: object) -> pl.DataFrame:
    held = _query(database, "holdings", **selection).to_arrow_table()
    return pl.DataFrame(pl.from_arrow(held))


@pytest.fixture(autouse=True)
def _narrow_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small stores are split like large ones."""
    monkeypatch.setattr(named_reads, "_STRETCH", 3)


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
        for row in _query(tangled, name, **selection, **more, columns=key).fetchall():
            if row[0] is not None:
                found.setdefault(row, {"calls": 0, "spans": 0})[name] += 1
    held = _held(tangled, **selection).filter("is_selected")
    counted = held.group_by(key).agg(pl.col("calls", "spans").sum())
    assert {row[:6]: {"calls": row[6], "spans": row[7]} for row in counted.iter_rows()} == found
    assert len(found) > 5
    for seq, rollout_id in _query(tangled, "spans", **selection, columns=["seq", "rollout_id"]).fetchall():
        assert (
            rollout_id is None
            or held.filter(pl.lit(seq).is_between("first_seq", "last_seq"), rollout_id=rollout_id).height
        )


def test_tokens_are_read_by_their_place(tangled: Database) -> None:
    columns = list(TOKENS)
    calls = _query(tangled, "calls", columns=["seq", *columns]).fetchall()
    wanted = calls[::2]
    assert len(wanted) > 5
    assert _rows(tangled, "tokens", seqs=[row[0] for row in wanted]) == sorted(repr(row[1:]) for row in wanted)
    assert _rows(tangled, "tokens", seqs=[]) == _rows(tangled, "tokens", seqs=[10**9]) == []
    [(spans_only,)] = tangled.cursor().execute("SELECT min(seq) FROM stored.spans WHERE NOT is_call").fetchall()
    assert _rows(tangled, "tokens", seqs=[spans_only]) == []
    assert _rows(tangled, "tokens", seqs=[wanted[0][0]], columns=["span_id"]) == [
        repr((wanted[0][1 + columns.index("span_id")],))
    ]


def test_the_texts_of_spans_are_read_by_their_place_or_their_traces(tangled: Database) -> None:
    cursor, columns = tangled.cursor(), ", ".join(TEXTS)
    spans = cursor.execute(f"SELECT {columns} FROM stored.live_spans ORDER BY seq").fetchall()
    wanted, traces = spans[::3], sorted({row[1] for row in spans})[:3]
    assert _rows(tangled, "texts", seqs=[row[0] for row in wanted]) == sorted(map(repr, wanted))
    of_traces = [row for row in spans if row[1] in traces]
    assert 0 < len(of_traces) < len(spans)
    assert _rows(tangled, "texts", trace_ids=traces) == sorted(map(repr, of_traces))
    [(replaced,)] = cursor.execute(
        "SELECT min(seq) FROM stored.superseded SEMI JOIN stored.spans USING (seq)"
    ).fetchall()
    assert _rows(tangled, "texts", seqs=[replaced]) == _rows(tangled, "texts", seqs=[]) == []
    assert _rows(tangled, "texts", trace_ids=[]) == _rows(tangled, "texts", trace_ids=["f" * 32]) == []


def test_the_newest_rows_are_those_that_arrived_last(tangled: Database) -> None:
    cursor, last_seq = tangled.cursor(), tangled.progress().last_seq
    wanted = (
        f"SELECT seq, rollout_id, left(task_id, 300), rollout_status FROM stored.live_spans WHERE seq > {last_seq} - 30"
    )
    columns = ["seq", "rollout_id", "task_id", "rollout_status"]
    found = _query(tangled, "newest", rows=30, columns=columns).fetchall()
    assert found == cursor.sql(f"{wanted} ORDER BY seq DESC").fetchall()
    assert 5 < len(found) <= 30


def test_activity_counts_what_ended_since(tangled: Database) -> None:
    cursor = tangled.cursor()
    ends = [row[0] for row in cursor.sql("SELECT DISTINCT end_ns FROM spans ORDER BY 1").fetchall() if row[0]]
    for since_ns in (0, ends[len(ends) // 2], ends[-1] + 1):
        ended = f"FROM stored.live_spans WHERE end_ns >= {since_ns}"
        calls, tokens = cursor.sql(
            f"SELECT count(*), coalesce(sum(coalesce(len(prompt_ids), 0) + coalesce(len(completion_ids), 0)), 0) {ended} AND is_call"
        ).fetchall()[0]
        [(rollouts,)] = cursor.sql(f"SELECT count(*) {ended} AND rollout_status IS NOT NULL").fetchall()
        assert _query(tangled, "activity", since_ns=since_ns).fetchall() == [(calls, tokens, rollouts)]
    assert calls == 0


@pytest.mark.parametrize("selection", SELECTIONS)
def test_holdings_of_a_task_are_those_of_the_whole_store(tangled: Database, selection: dict[str, object]) -> None:
    asked = {**selection, "task_id": "t1", "columns": ["rollout_id", "trace_id", "first_seq", "is_selected"]}
    found = _held(tangled, **asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named_reads, "SEEDS", {})
        whole = _held(tangled, **asked)
    # Others in their traces are there too, but not with all that makes up their identity.
    assert found.filter("is_selected").sort(pl.all()).equals(whole.filter("is_selected").sort(pl.all()))
    assert set(found["rollout_id"]) == set(whole["rollout_id"])
    assert 0 < found["is_selected"].sum() < found.height


def test_records_are_read_by_event_trace_and_attribute(tangled: Database) -> None:
    cursor = tangled.cursor()
    columns = ["seq", "trace_id", "attributes"]
    logs = cursor.execute(
        f"SELECT {', '.join(columns)} FROM logs WHERE event_name = '{keys.EVALUATION_EVENT}'"
    ).fetchall()
    traces = sorted({trace for _, trace, _ in logs})[:3]
    asked: dict[str, object] = {"event_names": [keys.EVALUATION_EVENT, "other"], "columns": columns}
    assert _rows(tangled, "records", **asked) == sorted(map(repr, logs))
    some = [row for row in logs if row[1] in traces]
    assert _rows(tangled, "records", **asked, trace_ids=traces) == sorted(map(repr, some))
    some = [row for row in logs if keys.TASK_ID in row[2]]
    assert _rows(tangled, "records", **asked, attribute=keys.TASK_ID) == sorted(map(repr, some))
    assert 0 < len(some) < len(logs)
    assert _rows(tangled, "records", event_names=[], trace_ids=[]) == []


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("tokens", {}, "seqs"),
        ("tokens", {"seqs": ["1"]}, "list of integers"),
        ("tokens", {"seqs": [True]}, "list of integers"),
        ("tokens", {"seqs": [1], "columns": ["attributes"]}, "no column 'attributes'"),
        ("tokens", {"seqs": [1], "run_id": "a"}, "no parameter 'run_id'"),
        ("texts", {}, "needs the parameter seqs"),
        ("texts", {"seqs": [1], "trace_ids": []}, "no parameter 'seqs'"),
        ("texts", {"trace_ids": [1]}, "list of strings"),
        ("holdings", {"without_calls": True}, "no parameter 'without_calls'"),
        ("records", {}, "needs the parameter event_names"),
        ("records", {"event_names": ["a"], "trace_ids": "t"}, "list of strings"),
        ("records", {"event_names": ["a"], "trusted": 1}, "not of type bool"),
        ("activity", {}, "needs the parameter since_ns"),
        ("newest", {"rows": 0}, "not between 1 and 10000"),
        ("newest", {"round": 1}, "no parameter 'round'"),
        ("calls", {"task_id": "t"}, "no parameter 'task_id'"),
    ],
)
def test_what_such_a_read_does_not_know_is_said(
    tangled: Database, name: str, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _query(tangled, name, **parameters)


def test_the_columns_are_those_promised(tangled: Database) -> None:
    for name, columns, parameters in (
        ("holdings", HOLDINGS, {}),
        ("foreign", FOREIGN, {}),
        ("tokens", TOKENS, {"seqs": [1]}),
        ("texts", TEXTS, {"seqs": [1]}),
        ("records", tuple(READS["logs"]), {"event_names": []}),
        ("newest", tuple(NEWEST), {}),
        ("activity", ACTIVITY, {"since_ns": 0}),
    ):
        assert tuple(_query(tangled, name, **parameters).columns) == columns
    assert not {"holdings", "foreign", "tokens", "texts", "records", "newest", "activity"} & set(READS)


@pytest.mark.parametrize(("without", "column"), [("without_run", "run_id"), ("without_round", "round")])
def test_sizes_of_rollouts_without_a_run_or_round(tangled: Database, without: str, column: str) -> None:
    read = _query(tangled, "spans", columns=["rollout_id", column]).fetchall()
    expected = Counter(rollout_id for rollout_id, value in read if rollout_id is not None and value is None)
    sized = _query(tangled, "sizes", **{without: True}, columns=["rollout_id", "spans"]).fetchall()
    assert dict(sized) == expected
    assert expected


@pytest.mark.parametrize("name", ["spans", "calls"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_parts_are_the_rows_in_the_order_of_their_start(
    tangled: Database, name: str, selection: dict[str, object]
) -> None:
    columns = ["start_ns", "seq", "rollout_id"]
    whole = sorted(_query(tangled, name, **selection, columns=columns).fetchall(), key=lambda row: row[:2])
    parts = []
    for skip in range(0, len(whole) + 2, 2):
        parts += _query(tangled, name, **selection, columns=columns, skip=skip, rows=2).fetchall()
    assert parts == [(*row, len(whole)) for row in whole]
    assert len(whole) > 2


@pytest.mark.ci
@pytest.mark.parametrize("selection", SELECTIONS)
def test_sizes_count_what_the_reads_give(tangled: Database, selection: dict[str, object]) -> None:
    expected: dict[str, list[int]] = {}
    for place, name in enumerate(("spans", "calls")):
        for (rollout_id,) in _query(tangled, name, **selection, columns=["rollout_id"]).fetchall():
            if rollout_id is not None:
                expected.setdefault(rollout_id, [0, 0])[place] += 1
    everything = sum(spans for spans, _ in expected.values())
    columns = ["rollout_id", "spans", "calls", "all_rollouts", "all_spans"]
    sized = _query(tangled, "sizes", **selection, columns=columns).fetchall()
    assert {row[0]: [row[1], row[2]] for row in sized} == expected
    assert {row[3:] for row in sized} == {(len(expected), everything)}
    assert [row[1] for row in sized] == sorted((row[1] for row in sized), reverse=True)
    assert _query(tangled, "sizes", **selection, columns=columns, rows=1).fetchall() == sized[:1]
    for rollout_id in expected:
        own = _query(tangled, "sizes", rollout_ids=[rollout_id], columns=["evaluations", "logs", "tokens"]).fetchall()
        given = _query(tangled, "evaluations", rollout_ids=[rollout_id], columns=["seq"]).fetchall()
        logs = _query(tangled, "logs", rollout_ids=[rollout_id], columns=["seq"]).fetchall()
        tokens = _query(tangled, "calls", rollout_ids=[rollout_id], columns=["n_tokens"]).fetchall()
        assert own == [(len(given), len(logs), sum(row[0] for row in tokens))]


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"rows": 10_001}, {"skip": -1}, {"skip": True}, {"rows": "1"}])
def test_parts_and_sizes_are_bounded(tangled: Database, wrong: dict[str, object]) -> None:
    for name in ("spans", "calls", *(["sizes"] if "skip" not in wrong else [])):
        with pytest.raises(UsageError):
            _query(tangled, name, **wrong)


def test_foreign_rollouts_have_evaluations_and_no_span(tangled: Database) -> None:
    cursor = tangled.cursor()
    judged = dict(
        cursor.execute(
            "SELECT rollout_id, min(seq) FROM stored.evaluations WHERE rollout_id IS NOT NULL GROUP BY ALL"
        ).fetchall()
    )
    here = {row[0] for row in cursor.execute("SELECT DISTINCT rollout_id FROM stored.spans").fetchall()}
    expected = {rollout_id: seq for rollout_id, seq in judged.items() if rollout_id not in here}
    assert dict(_query(tangled, "foreign").fetchall()) == expected
    assert 0 < len(expected) < len(judged)
