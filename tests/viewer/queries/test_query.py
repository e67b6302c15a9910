"""Queries whose results are odd, large or wrong."""

from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import StoreError
from trainspan_viewer.html.document import served
from trainspan_viewer.pages.query import render_query
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.places import ViewerPaths
from trainspan_viewer.queries.query import QueryModel, load_query
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader


@pytest.fixture
def sources(bench: Bench, tmp_path: Path) -> Any:
    store = str(bench.collectors[0].store)
    made = Sources(ViewerPaths(tmp_path, tmp_path), StoreReader(store), Settings())
    yield made
    made.store.close()


def ask(sources: Sources, sql: str, **query: list[str]) -> tuple[QueryModel, str]:
    model = load_query(sources, Params("/query", {}, {"sql": [sql], **query}))
    return model, served(render_query(model))


@pytest.mark.parametrize(
    "values",
    [
        "(0, -3), (1, -1), (2, -2)",
        "('nan'::DOUBLE, 1), (1, 2), (2, 3)",
        "(0, 1e308::DOUBLE), (1, -1e308::DOUBLE), (2, 1)",
        "(1e308::DOUBLE, 1), (-1e308::DOUBLE, 2), (1, 3)",
        "(0, 5e-324::DOUBLE), (1, 0), (2, 1e-320::DOUBLE)",
        "(0, 'inf'::DOUBLE), (1, '-inf'::DOUBLE), (2, 'nan'::DOUBLE)",
        "(0, 170141183460469231731687303715884105727::HUGEINT), (1, 1), (2, 2)",
        "(TIMESTAMP '294247-01-10', 1), (TIMESTAMP 'infinity', 2)",
        "(DATE '5881580-07-10', 1), (DATE 'infinity', 2)",
    ],
)
def test_odd_values_are_shown_or_their_column_is_named(sources: Sources, values: str) -> None:
    sql = f"SELECT * FROM (VALUES {values}) t(x, y)"
    for kind in ("line", "bars"):
        model, page = ask(sources, sql, chart=[kind])
        assert "nan," not in page
        assert model.result is not None or "column x has a value that cannot be shown" in model.error


def test_sums_are_charted(sources: Sources) -> None:
    model, page = ask(sources, "SELECT range % 4 AS n, sum(range) AS total FROM range(40) GROUP BY n ORDER BY n")
    assert (model.x, list(model.y), "<polyline" in page) == ("n", ["total"], True)
    assert model.result is not None
    assert model.result.rows[0] == (0, 180)


def test_rows_without_a_bar_are_counted(sources: Sources) -> None:
    _, page = ask(sources, "SELECT range - 2 AS n, range - 2 AS y FROM range(50)", chart=["bars"], x=["n"], y=["y"])
    assert "y by n, without 10 other rows: at most 40 numbers from 0 on" in page
    _, page = ask(sources, "SELECT range AS n, range AS y FROM range(40)", chart=["bars"], x=["n"], y=["y"])
    assert "without" not in page


def test_columns_and_bytes_of_the_page_are_bounded(sources: Sources) -> None:
    wide = ", ".join(f"repeat('x', 300) AS c{number}" for number in range(200))
    model, page = ask(sources, f"SELECT {wide} FROM range(500)")
    assert "140 more columns are not shown." in page
    assert model.result is not None
    assert model.result.is_cut
    assert len(page) < 1_000_000
    model, page = ask(sources, "SELECT range AS n, range AS y FROM range(500)", y=["y"] * 500)
    assert list(model.y) == ["y"]
    assert page.count("<figure") == 1


def test_a_wrong_query_keeps_the_connection(sources: Sources) -> None:
    store = sources.store
    (connection,) = store._connections
    store.select("SELECT 1")
    before = connection._open
    with pytest.raises(StoreError, match="nothing"):
        store.select("SELECT nothing")
    assert connection._open is before is not None
