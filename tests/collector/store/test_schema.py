"""The store's tables and views against the expectations of other processes and our own rows."""

import hashlib
import json

import pytest

from tests.support.collector.process import CollectorProcess, get, select
from trainspan_collector.query.named_reads import READS
from trainspan_schemas.store.tables import TABLES, columns
from trainspan_schemas.store.views import STORE_VERSION, VIEWS


def _describe(collector: CollectorProcess, table: str) -> list[tuple[str, str]]:
    return [(row[0], row[1]) for row in select(collector.address, f"DESCRIBE {table}")]


@pytest.mark.parametrize("view", VIEWS)
def test_the_view_has_exactly_the_agreed_columns(collector: CollectorProcess, view: str) -> None:
    assert _describe(collector, view) == list(VIEWS[view].items())


def test_the_public_views_are_the_agreed_ones_and_no_more(collector: CollectorProcess) -> None:
    query = "SELECT view_name FROM duckdb_views() WHERE schema_name = 'main' AND NOT internal"
    assert {name for (name,) in select(collector.address, query)} == set(VIEWS)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_columns_of_its_rows(collector: CollectorProcess, table: str) -> None:
    declared = [(column.name, column.sql_type) for column in columns(TABLES[table])]
    assert _describe(collector, f"stored.{table}") == declared


def test_stored_and_public_columns_change_only_on_purpose() -> None:
    """A changed stored column needs a new store version, a changed public one a note to readers."""
    stored = {name: [column.definition for column in columns(row)] for name, row in TABLES.items()}
    declared = json.dumps([stored, VIEWS]).encode()
    assert hashlib.sha256(declared).hexdigest()[:16] == "42d19ed54e580f9d"


@pytest.mark.parametrize("name", READS)
def test_each_named_read_gives_the_columns_it_promises(collector: CollectorProcess, name: str) -> None:
    everything = {"run_id": "r", "round": 1, "rollout_ids": ["a"], "without_rollout": True, "since_seq": 0}
    for parameters in ({}, everything):
        table = get(collector.address, {"read": name, "parameters": parameters})
        assert tuple(table.schema.names) == READS[name]
    assert READS[name][: len(VIEWS[name])] == tuple(VIEWS[name])


def test_the_store_says_its_version(collector: CollectorProcess) -> None:
    assert select(collector.address, "SELECT value FROM meta WHERE key = 'schema_version'") == [(str(STORE_VERSION),)]
