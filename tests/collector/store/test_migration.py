"""A store of an earlier version is migrated to this version with all of its data."""

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.collector.process import (
    Attribute,
    CollectorProcess,
    event,
    export,
    export_logs,
    get,
    key_values,
    read,
    running,
    select,
    span,
    span_id,
    spawn_collector,
    trace_id,
)
from trainspan_collector.rows.promoted import PROMOTED
from trainspan_collector.store.database import Database
from trainspan_collector.store.row_groups import largest_row_bytes, rows_at_once
from trainspan_schemas.store.views import CALL_FACTS, STORE_VERSION, VIEWS
from trainspan_schemas.telemetry import keys

VERSION_1 = (Path(__file__).parent / "store_version_1.sql").read_text()
ROLLOUT = {keys.ROLLOUT_ID: "r", keys.ROLLOUT_STATUS: "ok"}
OLD_ROWS = f"""
INSERT INTO meta VALUES ('schema_version', '1');
INSERT INTO stored.spans BY NAME SELECT
    1 AS seq, 1::UBIGINT AS span_key, 200 AS richness, '{trace_id(1).hex()}' AS trace_id, '{span_id(1).hex()}' AS span_id,
    'old' AS name, 1 AS kind, 1000 AS start_ns, 2000 AS end_ns, 0 AS status_code, '' AS status_message, '' AS scope_name,
    '{{}}' AS scope_json, '{{"a":1}}' AS attributes, '{{}}' AS resource, '[]' AS events, '[]' AS links, '' AS trace_state,
    0 AS flags, 0 AS dropped_attributes, 0 AS dropped_events, 0 AS dropped_links, 'r' AS rollout_id, 0 AS attempt,
    'ok' AS rollout_status, true AS is_call, [1, 2] AS prompt_ids, [3] AS completion_ids, [-0.5] AS logprobs;
INSERT INTO stored.evaluations BY NAME SELECT
    2 AS seq, 'k'::BLOB AS key, true AS on_span, '{trace_id(1).hex()}' AS trace_id, '{span_id(1).hex()}' AS span_id,
    'r' AS rollout_id, 0 AS attempt, 'reward' AS name, 0.5 AS score, 1500 AS time_ns;
INSERT INTO stored.logs BY NAME SELECT
    3 AS seq, 'h'::BLOB AS content_hash, 1700 AS time_ns, 0 AS observed_ns, '"body"' AS body, '{{}}' AS attributes;
UPDATE stored.progress SET last_seq = 3;
"""


def _old_store(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute(VERSION_1)
        connection.execute(OLD_ROWS)


@pytest.mark.ci
def test_a_store_of_version_1_is_migrated_with_all_its_rows_and_stays_usable(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    _old_store(store)
    with running(store) as collector:
        assert _versions(collector) == [(str(STORE_VERSION),)]
        [row] = read(collector.address, "spans")
        assert (row["name"], row["attributes"], row["start_ns"]) == ("old", '{"a":1}', 1000)
        assert (row["attribute_keys"], row["call_facts"]) == ("\na\n", None)
        [call] = read(collector.address, "calls")
        assert (call["prompt_ids"], call["completion_ids"], call["logprobs"]) == ([1, 2], [3], [-0.5])
        assert [row["reward"] for row in read(collector.address, "rollouts")] == [0.5]
        ages = "SELECT received_ns FROM stored.spans UNION ALL FROM (SELECT received_ns FROM stored.logs)"
        assert select(collector.address, f"{ages} ORDER BY ALL") == [(1700,), (2000,)]
        of_rollout = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 0.25, keys.EVALUATION_OF: "rollout"}
        late = event(keys.EVALUATION_EVENT, of_rollout)
        export(collector.address, span(1, 2, {keys.ROLLOUT_ID: "r"}, events=[late]))
        assert [row["seq"] for row in read(collector.address, "spans")] == [1, 4]
        assert [row["reward"] for row in read(collector.address, "rollouts")] == [0.75]
    with running(store) as again:
        assert len(read(again.address, "spans")) == 2


@pytest.mark.ci
def test_a_migrated_store_reads_as_if_the_collector_of_now_had_taken_its_spans(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store) as collector:
        export(collector.address, *_various_spans())
        get(collector.address, {"sql": "SELECT 1", "wait_ms": 60_000})  # all is loaded
        before = {name: read(collector.address, name) for name in ("spans", "calls")}
    with duckdb.connect(str(store)) as connection:
        for column in PROMOTED:
            connection.execute(f"ALTER TABLE stored.spans DROP COLUMN {column}")
        connection.execute("UPDATE meta SET value = '2'")
    with running(store) as migrated:
        assert _versions(migrated) == [(str(STORE_VERSION),)]
        assert {name: read(migrated.address, name) for name in ("spans", "calls")} == before
        assert select(migrated.address, "SELECT count(*) FROM duckdb_functions() WHERE function_name = 'facts_of'") == [
            (0,)
        ]
    assert len(before["spans"]) == 2_603
    assert len({(row["call_facts"], row["attribute_keys"]) for row in before["calls"]}) == 6


def _various_spans() -> Iterator[Span]:
    tokens: dict[str, Attribute] = {keys.PROMPT_TOKEN_IDS: [1], keys.COMPLETION_TOKEN_IDS: [2]}
    values: list[Attribute] = [1.0, 1, "1.0", True, {"a": [1]}, float("nan")]
    for number in range(2_600):  # more than a row group
        facts = dict.fromkeys(CALL_FACTS, values[number % len(values)])
        said = {keys.GEN_AI_OPERATION: "chat", keys.GEN_AI_RESPONSE_ID: f'r-{number} " \\ é', keys.STATE_KEY: "\n"}
        yield span(1, number + 1, {**said, **facts, **(tokens if number % 5 else {})})
    yield span(1, 3_001)
    yield span(1, 3_002, {keys.PROMPT_TOKEN_IDS: "no ids", keys.REDACTED: ["a", "b"]})
    twice = span(1, 3_003, {keys.GEN_AI_REQUEST_MODEL: "first", "other": 1})
    twice.attributes.extend(key_values({keys.GEN_AI_REQUEST_MODEL: "last"}))
    yield twice


def test_records_of_a_version_3_store_are_trusted_if_their_evaluation_is(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store):
        pass
    kept, dropped, of_agent, other = 10, 20, 30, 40
    with duckdb.connect(str(store)) as connection:
        connection.execute("ALTER TABLE stored.logs DROP COLUMN untrusted")
        connection.execute("UPDATE meta SET value = '3'")
        for seq in (kept, dropped, of_agent, other):
            name = keys.EVALUATION_EVENT if seq != other else "something"
            connection.execute(
                "INSERT INTO stored.logs BY NAME SELECT ? AS seq, encode(?) AS content_hash, ? AS event_name,"
                " 1 AS time_ns, '{}' AS attributes",
                [seq, str(seq), name],
            )
        for seq, untrusted in ((kept, False), (of_agent, True)):
            connection.execute(
                "INSERT INTO stored.evaluations BY NAME SELECT ? AS seq, encode(?) AS key, ? AS untrusted, false AS on_span",
                [seq + 1, str(seq), untrusted],
            )
        connection.execute("UPDATE stored.progress SET last_seq = 41")
    with running(store) as migrated:
        found = select(migrated.address, "SELECT seq, untrusted FROM logs ORDER BY seq")
        assert found == [(kept, False), (dropped, True), (of_agent, True), (other, False)]


@pytest.mark.ci
def test_a_migrated_store_has_the_tables_and_views_of_a_new_one(tmp_path: Path) -> None:
    columns = "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE database_name = 'store'"
    _old_store(tmp_path / "old.duckdb")
    with running(tmp_path / "old.duckdb") as migrated, running(tmp_path / "new.duckdb") as new:
        order = "ORDER BY schema_name, table_name, column_index"
        found = select(migrated.address, f"{columns} {order}")
        assert found == select(new.address, f"{columns} {order}")
        assert {name for name, *_ in found} > set(VIEWS)


@pytest.mark.ci
def test_a_store_that_is_larger_than_the_memory_is_migrated(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    _old_store(store)
    with duckdb.connect(config={"temp_directory": str(tmp_path)}) as connection:
        connection.execute(f"ATTACH '{store}' AS store (ROW_GROUP_SIZE 2048); USE store")
        connection.execute(
            "INSERT INTO stored.spans BY NAME SELECT s.* EXCLUDE (seq, attributes), range + 10 AS seq,"
            " format('{{\"k{}\":1}}', range) AS attributes FROM stored.spans s, range(150000)"
        )
    database = Database(store, memory_bytes=20 * 2**20)
    found = database.cursor().execute(
        "SELECT count(*), sum((attribute_keys = format('\nk{}\n', seq - 10))::INT) FROM stored.spans WHERE seq >= 10"
    )
    assert found.fetchall() == [(150_000, 150_000)]
    database.close()


@pytest.mark.ci
@pytest.mark.parametrize(("of_span", "of_log", "rows_at_a_time"), [(1, 1, 2048), (500_000, 1, 16), (1, 10**6, 16)])
def test_a_store_of_version_5_is_read_by_the_size_of_its_largest_row(
    tmp_path: Path, of_span: int, of_log: int, rows_at_a_time: int
) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store) as collector:
        export(collector.address, span(1, 1, {"text": "x" * of_span}), span(1, 2))
        export_logs(collector.address, LogRecord(time_unix_nano=1, body=AnyValue(string_value="x" * of_log)))
        before = read(collector.address, "spans"), read(collector.address, "logs")
    with duckdb.connect(str(store)) as connection:
        connection.execute("DELETE FROM meta")
        connection.execute("INSERT INTO meta VALUES ('schema_version', '5')")
        for table in ("spans", "logs"):  # of this version alone
            connection.execute(f"DELETE FROM stored.{table} WHERE seq IS NULL")
    database = Database(store, memory_bytes=2**27)
    assert database.migrated_from == 5
    assert rows_at_once(largest_row_bytes(database.cursor())) == rows_at_a_time
    database.close()
    with running(store) as migrated:
        export(migrated.address, span(1, 3))
        assert (read(migrated.address, "spans")[:2], read(migrated.address, "logs")) == before
        assert len(read(migrated.address, "spans")) == 3


def test_a_migration_that_fails_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    _old_store(store)
    with duckdb.connect(str(store)) as connection:
        connection.execute("ALTER TABLE stored.logs ADD COLUMN received_ns BIGINT")  # in the way of the migration
    process = spawn_collector(store)
    _, text = process.communicate(timeout=30)
    assert process.returncode == 1
    [line] = text.splitlines()
    assert "received_ns" in line
    with duckdb.connect(str(store), read_only=True) as connection:
        assert connection.execute("SELECT value FROM meta").fetchall() == [("1",)]
        assert connection.execute("SELECT count(*) FROM stored.spans").fetchall() == [(1,)]
        assert "received_ns" not in [row[0] for row in connection.execute("DESCRIBE stored.spans").fetchall()]


def _versions(collector: CollectorProcess) -> list[tuple[object, ...]]:
    return select(collector.address, "SELECT value FROM meta WHERE key = 'schema_version'")
