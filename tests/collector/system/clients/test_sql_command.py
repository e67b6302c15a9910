"""`trainspan sql` as a user runs it."""

import csv
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.collector.process import CollectorProcess, export, running, span, trace_id


def _sql(*arguments: str, home: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trainspan_cli", "sql", *arguments]
    environ = {**os.environ, "TRAINSPAN_HOME": str(home)} if home else None
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


@pytest.fixture(scope="module")
def store(collector: CollectorProcess) -> str:
    export(
        collector.address,
        span(1, 1, name="plain"),
        span(1, 2, name="\x1b[31mred\x1b[0m [bold]x[/bold] :smile:\r\n\u202egpj\x00"),
    )
    return str(collector.store)


def test_a_table_shows_text_as_it_is_and_control_characters_as_escapes(store: str) -> None:
    done = _sql("--store", store, "SELECT name, NULL AS nothing, [1, 2] AS list FROM spans ORDER BY span_id")
    assert done.returncode == 0
    assert "│ plain" in done.stdout
    assert r"\x1b[31mred\x1b[0m [bold]x[/bold] :smile:\r\n\u202egpj\x00" in done.stdout
    assert "│ NULL    │ [1, 2] │" in done.stdout
    assert not [c for c in done.stdout if not c.isprintable() and c != "\n"]


def test_json_lines_keep_types(store: str, collector: CollectorProcess) -> None:
    query = """
        SELECT trace_id, 9007199254740993 AS big, 1.5::DOUBLE AS x, 'nan'::DOUBLE AS nan, true AS flag, NULL AS nothing,
            'ab'::BLOB AS blob, [1, NULL] AS list, {'a': 'b'} AS struct, sum(1) AS total, 1.25::DECIMAL(4, 2) AS price,
            0.12345678901234567890123::DECIMAL(38, 23) AS fine,
            DATE '2024-01-02' AS day, 1 AS a, 2 AS a
        FROM spans GROUP BY trace_id
    """
    location = f"grpc://{collector.address.flight}"
    done = _sql("--store", location, "--format", "json", query, home=collector.store.parent)
    [line] = done.stdout.splitlines()
    assert json.loads(line) == {
        "trace_id": trace_id(1).hex(), "big": 9007199254740993, "x": 1.5, "nan": "nan", "flag": True, "nothing": None,
        "blob": {"bytes": "YWI="}, "list": [1, None], "struct": {"a": "b"}, "total": 2, "price": 1.25,
        "fine": "0.12345678901234567890123",
        "day": "2024-01-02", "a": 1, "a_1": 2,
    }  # fmt: skip


def test_csv_quotes_what_needs_it(store: str) -> None:
    query = """SELECT 'a"b,c' AS text, NULL AS nothing, [1.5] AS list, 7 AS n"""
    done = _sql("--store", store, "--format", "csv", query)
    assert list(csv.reader(io.StringIO(done.stdout))) == [["text", "nothing", "list", "n"], ['a"b,c', "", "[1.5]", "7"]]


def test_a_table_stops_after_a_hundred_rows_and_says_so_and_max_rows_changes_that(store: str) -> None:
    query = "SELECT range AS r FROM range(150)"
    done = _sql("--store", store, query)
    assert "│ 99 " in done.stdout
    assert "│ 100 " not in done.stdout
    assert "--max-rows" in done.stderr
    assert "│ 149 │" in _sql("--store", store, "--max-rows", "0", query).stdout
    assert _sql("--store", store, "--format", "json", "--max-rows", "2", query).stdout == '{"r": 0}\n{"r": 1}\n'
    assert len(_sql("--store", store, "--format", "json", query).stdout.splitlines()) == 150


@pytest.mark.ci
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["SELEC 1"], 1, "syntax error"),
        (
            ["SELECT rollout FROM spans"],
            1,
            'column "rollout" not found in FROM clause! Candidate bindings: "rollout_id"',
        ),
        (["DELETE FROM spans"], 1, "exactly one SELECT"),
        (["SELECT * FROM read_text('/etc/passwd')"], 1, "disabled"),
        (["--format", "xml", "SELECT 1"], 2, "--format 'xml'"),
        (["--store", "/nonexistent/spans.duckdb", "SELECT 1"], 1, "no store at /nonexistent/spans.duckdb"),
        (["--store", "grpc://127.0.0.1:1", "SELECT 1"], 1, "no collector answers at grpc://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_answered_is_one_line_on_stderr(
    store: str, arguments: list[str], code: int, message: str
) -> None:
    done = _sql(*(() if "--store" in arguments else ("--store", store)), *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    [line] = done.stderr.splitlines()
    assert message in line


@pytest.mark.ci
def test_a_store_without_a_running_collector_is_read_all_the_same(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb") as started:
        export(started.address, span(1, 1, name="kept"))
    done = _sql("--store", str(started.store), "--format", "csv", "SELECT name FROM spans")
    assert done.stdout == "name\nkept\n"
    assert not (tmp_path / "spans.duckdb.json").exists()


def test_output_that_is_cut_off_by_its_reader_is_no_error(store: str) -> None:
    command = (
        f"{sys.executable} -m trainspan_cli sql --store {store} --format csv 'SELECT * FROM range(200000)' | head -1"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("range\n", "")


@pytest.mark.ci
def test_a_query_during_ingest_sees_one_picture_in_all_its_parts(collector: CollectorProcess) -> None:
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            export(collector.address, *(span(7, number + index, name="live") for index in range(1, 6)))
            number += 5

    writer = threading.Thread(target=write)
    writer.start()
    try:
        live = "FROM spans WHERE name = 'live'"
        query = f"SELECT (SELECT count(*) {live}) AS n, (SELECT count(DISTINCT span_id) {live}) AS ids, "
        query += f"(SELECT max(('0x' || span_id)::BIGINT) {live}) AS last, (SELECT count(*) FROM spans a {live[11:]}) AS again"
        seen = []
        for _ in range(3):
            [line] = _sql("--store", str(collector.store), "--format", "json", query).stdout.splitlines()
            row = json.loads(line)
            assert row["n"] == row["ids"] == row["last"] == row["again"]  # each span up to the last, once
            seen.append(row["n"])
    finally:
        done.set()
        writer.join()
    assert 0 < seen[0] < seen[1] < seen[2]
