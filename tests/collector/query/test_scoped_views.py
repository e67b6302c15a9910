"""Reads of some rollouts: the same rows as from the whole store, at a cost proportional to what is requested."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.support.collector.filling import Filling
from tests.support.collector.process import Attribute, event, key_values, span, trace_id, trace_request
from trainspan_collector.journal.frames import Signal
from trainspan_collector.query import named_reads, places
from trainspan_collector.query.named_reads import READS, named_read
from trainspan_collector.query.places import RowPlaces
from trainspan_collector.store import insert
from trainspan_collector.store.database import Database
from trainspan_schemas.telemetry import keys

MEMORY_BYTES = 2**28


@pytest.fixture(autouse=True, scope="module")
def _narrow_places() -> Iterator[None]:
    """Small stores have many places, like large ones."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (insert, places):
            patch.setattr(module, "PLACE_ROWS", 16)
        yield


BRANCHES = ("t1@r1.0@0", "t1@r1.1@2", "t1@xr1.0@0", "t1@r1.0@none")
"""Tasks of branches of r1, of one of another rollout, and of one that is no branch."""


def _identity(random: Random) -> dict[str, Any]:
    """Identity attributes of a span, evaluation or record: all, some, or none."""
    said = {
        keys.ROLLOUT_ID: f"r{random.randrange(25)}",
        keys.ATTEMPT: random.randrange(2),
        keys.RUN_ID: random.choice("ab"),
        keys.ROUND: random.randrange(3),
        keys.TASK_ID: f"t{random.randrange(5)}",
    }
    kept = random.choice([(), (keys.ROLLOUT_ID,), (keys.ROUND,), (keys.RUN_ID, keys.ROUND), tuple(said)])
    return {key: said[key] for key in kept}


def _reward(random: Random) -> dict[str, Any]:
    return {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: random.random(), **_identity(random)}


def tangle(random: Random, filling: Filling) -> None:
    """Rollouts over several traces and attempts, traces of several rollouts, spans without identity, and duplicates."""
    for _ in range(12):
        spans = []
        for _ in range(random.randrange(1, 12)):
            of_rollout = {keys.ROLLOUT_STATUS: "ok"} if random.random() < 0.3 else {}
            tokens = {keys.PROMPT_TOKEN_IDS: b"\1\0\0\0"} if random.random() < 0.3 else {}
            events = [event(keys.EVALUATION_EVENT, _reward(random))] if random.random() < 0.3 else []
            attributes = {**_identity(random), **of_rollout, **tokens}
            spans.append(span(1 + random.randrange(30), 1 + random.randrange(6), attributes, events=events))
        filling.add(Signal.TRACES, trace_request(*spans).SerializeToString())
        records = ExportLogsServiceRequest()
        records.resource_logs.add().scope_logs.add().log_records.extend(
            LogRecord(
                trace_id=trace_id(random.randrange(30)),
                time_unix_nano=random.randrange(10**9),
                event_name=random.choice(["", keys.EVALUATION_EVENT]),
                attributes=key_values(_reward(random)),
            )
            for _ in range(random.randrange(6))
        )
        filling.add(Signal.LOGS, records.SerializeToString())
    for number, task in enumerate(BRANCHES):
        said = {keys.ROLLOUT_ID: f"b{number}", keys.TASK_ID: task, keys.RUN_ID: "a", keys.ROLLOUT_STATUS: "ok"}
        filling.add(Signal.TRACES, trace_request(span(40 + number, 1, said)).SerializeToString())


PARAMETERS: list[dict[str, object]] = [
    {"since_seq": 1},
    {"since_seq": 80},
    {"since_seq": 110},
    {"since_seq": 10**6},
    {"round": 0},
    {"round": 9},
    {"round": 1, "run_id": "a"},
    {"rollout_ids": ["r1"]},
    {"rollout_ids": ["r2", "r3", "nobody"], "round": 1},
    {"rollout_ids": ["r4", "r5"], "since_seq": 60},
    {"since_seq": 100, "run_id": "b"},
    {"since_seq": 100, "without_rollout": True},
    {"rollout_ids": []},
    {"without_rollout": True},
    {"without_rollout": True, "round": 1},
    {"task_id": "t1", "round": 1},
    {"task_id": "t3"},
    {"branches_of": "r1"},
    {"branches_of": "r1", "run_id": "a"},
]


def _rows(database: Database, name: str, parameters: Mapping[str, object]) -> list[str]:
    cursor = database.cursor()
    query = named_read(name, parameters, RowPlaces(cursor))
    return sorted(map(repr, cursor.sql(query.sql, params=query.parameters).fetchall()))


def _differing(database: Database, name: str) -> list[Mapping[str, object]]:
    """The parameters with which a read returns different rows than without narrowing."""
    differing = []
    for parameters in PARAMETERS:
        if name != "rollouts" and parameters.keys() & {"task_id", "branches_of"}:
            continue
        found = _rows(database, name, parameters)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(named_reads, "SEEDS", {})
            if found != _rows(database, name, parameters):
                differing.append(parameters)
    return differing


@pytest.fixture(scope="module")
def tangled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    folder = tmp_path_factory.mktemp("tangled")
    database = Database(folder / "s.duckdb", memory_bytes=MEMORY_BYTES)
    with closing(Filling(database, folder / "keys")) as filling:
        tangle(Random(0), filling)
    yield database
    database.close()


@pytest.mark.ci
@pytest.mark.parametrize("name", READS)
def test_rows_are_those_of_the_whole_store(tangled: Database, name: str) -> None:
    assert _differing(tangled, name) == []


def test_branches_are_found_by_the_rollout_in_their_task(tangled: Database) -> None:
    query = named_read("rollouts", {"branches_of": "r1", "columns": ["task_id"]}, RowPlaces(tangled.cursor()))
    found = {task for (task,) in tangled.cursor().execute(query.sql, query.parameters).fetchall()}
    assert found == {"t1@r1.0@0", "t1@r1.1@2"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_are_those_of_the_whole_store_in_ten_stores(tmp_path: Path) -> None:
    for seed in range(1, 11):
        database = Database(tmp_path / f"{seed}.duckdb", memory_bytes=MEMORY_BYTES)
        with closing(Filling(database, tmp_path / f"{seed}.keys")) as filling:
            tangle(Random(seed), filling)
        for name in READS:
            assert _differing(database, name) == [], (seed, name)
        database.close()


@pytest.mark.parametrize(
    "count",
    [
        "SELECT count(*) FROM stored.superseded",
        "SELECT count(*) FROM (SELECT rollout_id FROM stored.spans GROUP BY ALL HAVING count(DISTINCT trace_id) > 1)",
        "SELECT count(*) FROM (SELECT trace_id FROM stored.spans GROUP BY ALL HAVING count(DISTINCT rollout_id) > 1)",
        "SELECT count(*) FROM calls WHERE rollout_id IS NULL",
        "SELECT count(*) FROM rollouts WHERE reward IS NOT NULL",
        "SELECT count(*) FROM evaluations WHERE rollout_id IS NULL",
        "SELECT count(*) FROM logs",
    ],
)
def test_the_tangled_store_has_what_makes_it_hard(tangled: Database, count: str) -> None:
    assert tangled.cursor().execute(count).fetchall() > [(0,)]


def _operators(node: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    yield node.get("type", ""), node.get("intermediate_rows", 0)
    for child in node.get("children", []):
        yield from _operators(child)


def most_rows(database: Database, name: str, parameters: Mapping[str, object]) -> int:
    """The greatest number of rows output by a join or grouping."""
    query = named_read(name, parameters, RowPlaces(database.cursor()))
    [(_, plan)] = database.cursor().execute(f"EXPLAIN (ANALYZE, FORMAT json) {query.sql}", query.parameters).fetchall()
    rows = [
        n_rows
        for root in json.loads(plan)["operator"]
        for kind, n_rows in _operators(root)
        if "JOIN" in kind or "GROUP_BY" in kind
    ]
    assert len(rows) > 10
    return max(rows)


@pytest.mark.parametrize("name", READS)
def test_a_store_of_ten_times_the_size_gives_a_read_of_some_rollouts_no_more_to_join(
    stores: tuple[Database, Database], name: str
) -> None:
    for parameters in ({"last": 30}, {"rollout_ids": ["r7", "r8", "r9"]}, {"round": 1}):
        small, large = (
            most_rows(
                store, name, {"since_seq": store.progress().last_seq - 30} if "last" in parameters else parameters
            )
            for store in stores
        )
        assert 0 < large <= 1.2 * small < 1_000, parameters


def test_a_read_of_everything_joins_all_rows(stores: tuple[Database, Database]) -> None:
    assert [most_rows(store, "spans", {}) for store in stores] == [3_000, 30_000]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, Database]]:
    """300 and 3,000 rollouts with ten spans, a reward and a record each; ten rollouts per round."""
    folder = tmp_path_factory.mktemp("regular")
    small, large = (Database(folder / name, memory_bytes=MEMORY_BYTES) for name in ("small", "large"))
    for database, n_rollouts in ((small, 300), (large, 3_000)):
        with closing(Filling(database, folder / f"{n_rollouts}.keys")) as filling:
            for first in range(0, n_rollouts, 100):
                _add_rollouts(filling, range(first, first + 100))
    yield small, large
    small.close()
    large.close()


def _add_rollouts(filling: Filling, numbers: range) -> None:
    spans, records = [], ExportLogsServiceRequest()
    reward = event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0})
    for number in numbers:
        said: dict[str, Attribute] = {
            keys.ROLLOUT_ID: f"r{number}",
            keys.ATTEMPT: 0,
            keys.RUN_ID: "a",
            keys.ROUND: number // 10,
        }
        spans.append(span(1 + number, 1, {**said, keys.ROLLOUT_STATUS: "ok"}, events=[reward]))
        spans += [span(1 + number, call, {keys.PROMPT_TOKEN_IDS: b"\1\0\0\0"}) for call in range(2, 11)]
        records.resource_logs.add().scope_logs.add().log_records.append(
            LogRecord(trace_id=trace_id(1 + number), time_unix_nano=1)
        )
    filling.add(Signal.TRACES, trace_request(*spans).SerializeToString())
    filling.add(Signal.LOGS, records.SerializeToString())


def test_calls_of_named_rollouts_are_read_only_from_the_places_of_their_traces(tmp_path: Path) -> None:
    class Somewhere(RowPlaces):
        def of_rollouts(self, rollout_ids: object) -> str:
            return "(seq BETWEEN 7 AND 9)"

    with closing(Database(tmp_path / "s.duckdb", memory_bytes=1 << 28)) as database:
        query = named_read("calls", {"rollout_ids": ["r"], "columns": ["attributes"]}, Somewhere(database.cursor()))
    scans = query.sql.split("FROM stored.spans WHERE ")[1:]
    assert len(scans) == 3
    assert all("seq BETWEEN 7 AND 9" in scan[:40] for scan in scans)
