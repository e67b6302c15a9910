"""One SELECT of the reader on the store's views."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final

from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.views import VIEWS
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import QueryRows

__all__ = ["EXAMPLES", "QueryModel", "load_query"]

_MOST_ROWS: Final = 500
_MOST_COLUMNS: Final = 60
_MOST_CHARACTERS: Final = 400_000
"""Of the table: each cell shows at most 200."""
_MOST_CURVES: Final = 3
_KINDS: Final = ("line", "bars", "none")
EXAMPLES: Final = {
    "rollouts by round": (
        "SELECT round, count(*) AS rollouts, avg(reward) AS reward, avg(n_calls) AS calls\n"
        f"FROM rollouts WHERE split = 'train' AND NOT regexp_matches(coalesce(task_id, ''), '{BRANCH_TASK}')\n"
        "GROUP BY round ORDER BY round"
    ),
    "truncated answers by round": (
        "SELECT round, avg((finish_reason = 'length')::INT) AS truncated, count(*) AS calls\n"
        "FROM calls GROUP BY round ORDER BY round"
    ),
    "rewards by name and source": (
        "SELECT name, source, untrusted, count(*) AS n, avg(score) AS mean\nFROM evaluations GROUP BY ALL ORDER BY n DESC"
    ),
    "slowest calls": (
        "SELECT rollout_id, agent, call_index, (end_ns - start_ns) / 1e9 AS seconds, len(completion_ids) AS tokens\n"
        "FROM calls ORDER BY seconds DESC LIMIT 50"
    ),
    "spans by name": (
        "SELECT name, service_name, count(*) AS n, count(*) FILTER (status_code = 2) AS errors\n"
        "FROM spans GROUP BY ALL ORDER BY n DESC LIMIT 100"
    ),
}
"""Name → SELECT."""


@dataclass(frozen=True, slots=True)
class QueryModel:
    """The page of a query."""

    sql: str
    result: QueryRows | None
    error: str
    note: str
    """What of the result is left out, or why the query was not run."""
    took_s: float
    x: str
    y: Sequence[str]
    kind: str
    kinds: Sequence[str]
    views: dict[str, dict[str, str]]
    params: Params


def load_query(sources: Sources, params: Params) -> QueryModel:
    """An error of the query is part of the model."""
    sql = params.text("sql").strip()
    result, error, note = None, "", ""
    began = time.monotonic()
    if sql and params.is_foreign:
        note = "Another site led here, so the query was not run. Read it, then press run."
    elif sql:
        try:
            result, note = _bounded(sources.store.select(sql, most=_MOST_ROWS, names_store=True))
        except StoreError as refused:
            error = str(refused)
    x, y = _axes(result, params) if result else ("", [])
    return QueryModel(
        sql=sql,
        result=result,
        error=error,
        note=note,
        took_s=time.monotonic() - began,
        x=x,
        y=y,
        kind=params.choice("chart", _KINDS, "line"),
        kinds=_KINDS,
        views=VIEWS,
        params=params,
    )


def _axes(result: QueryRows, params: Params) -> tuple[str, list[str]]:
    """The columns that were chosen, else the first one against the other numeric ones."""
    numeric = [name for place, name in enumerate(result.columns) if _is_numeric([row[place] for row in result.rows])]
    x = params.text("x")
    x = x if x in result.columns else (result.columns[0] if result.columns else "")
    chosen = [name for name in dict.fromkeys(params.all("y")) if name in numeric]
    return x, (chosen or [name for name in numeric if name != x])[:_MOST_CURVES]


def _bounded(result: QueryRows) -> tuple[QueryRows, str]:
    """What one page shows of a result, and what it leaves out."""
    columns = result.columns[:_MOST_COLUMNS]
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in result.rows:
        size += sum(20 + min(200, len(str(value))) for value in row[:_MOST_COLUMNS])
        if size > _MOST_CHARACTERS:
            break
        rows.append(tuple(_plain(value) for value in row[:_MOST_COLUMNS]))
    left = len(result.columns) - len(columns)
    note = f"{left} more columns are not shown." if left else ""
    return replace(result, columns=columns, rows=rows, is_cut=result.is_cut or len(rows) < len(result.rows)), note


def _plain(value: Any) -> Any:
    """DuckDB's sums of integers are decimal numbers."""
    if not isinstance(value, Decimal):
        return value
    return int(value) if value == value.to_integral_value() else float(value)


def _is_numeric(values: Sequence[Any]) -> bool:
    found = [value for value in values if value is not None]
    return bool(found) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in found)
