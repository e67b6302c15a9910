"""One SELECT of the reader on the store's views."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainspan_schemas.errors import StoreError
from trainspan_schemas.views import VIEWS
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import Result

__all__ = ["EXAMPLES", "QueryModel", "load_query"]

_MOST_ROWS: Final = 500
_KINDS: Final = ("line", "bars", "none")
EXAMPLES: Final = {
    "rollouts by round": (
        "SELECT round, count(*) AS rollouts, avg(reward) AS reward, avg(n_calls) AS calls\n"
        "FROM rollouts WHERE split = 'train' GROUP BY round ORDER BY round"
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
    result: Result | None
    error: str
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
    result, error = None, ""
    began = time.monotonic()
    if sql:
        try:
            result = sources.store.select(sql, most=_MOST_ROWS)
        except StoreError as refused:
            error = str(refused)
    x, y = _axes(result, params) if result else ("", [])
    return QueryModel(
        sql=sql,
        result=result,
        error=error,
        took_s=time.monotonic() - began,
        x=x,
        y=y,
        kind=params.choice("chart", _KINDS, "line"),
        kinds=_KINDS,
        views=VIEWS,
        params=params,
    )


def _axes(result: Result, params: Params) -> tuple[str, list[str]]:
    """The columns that were chosen, else the first one against the other numeric ones."""
    numeric = [name for place, name in enumerate(result.columns) if _is_numeric([row[place] for row in result.rows])]
    x = params.text("x")
    x = x if x in result.columns else (result.columns[0] if result.columns else "")
    chosen = [name for name in params.all("y") if name in numeric]
    return x, chosen or [name for name in numeric if name != x][:3]


def _is_numeric(values: Sequence[Any]) -> bool:
    found = [value for value in values if value is not None]
    return bool(found) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in found)
