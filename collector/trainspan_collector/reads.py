"""Named reads of Flight: names and parameters → one SQL query with bound values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainspan_collector.facts import Facts
from trainspan_collector.nearby import SEEDS, nearby
from trainspan_schemas.errors import UsageError
from trainspan_schemas.views import VIEWS

__all__ = ["READS", "Query", "named_read"]

_EXTRAS: Final = {
    "spans": (
        *("rollout_id", "attempt", "task_id", "run_id", "round", "split", "agent"),
        *("rollout_status", "rollout_boundary", "rollout_judge", "rollout_calls"),
        *Facts._fields,
    ),
    "calls": (
        *("parent_span_id", "status_code", "attributes", "resource", "scope_name", "dropped_attributes"),
        *Facts._fields,
    ),
    "evaluations": ("attempt", "of", "on_span"),
}
"""Columns of a read beyond those of its view. The identity of a span is completed as that of a call is.
`of` is what the evaluation says it judges (`trainspan.evaluation.of`)."""

READS: Final[Mapping[str, tuple[str, ...]]] = {
    name: (*columns, *_EXTRAS.get(name, ())) for name, columns in VIEWS.items()
}
"""Read → its columns."""

_IDENTITY_COLUMNS: Final = frozenset(
    ("seq", "trace_id", "span_id", "rollout_id", "attempt", "task_id", "run_id", "round", "split")
)
"""Columns of a span or call that `stored.span_identities` gives; the others come from the span's own row."""

_OF_ROLLOUT: Final = """
LEFT JOIN (
    SELECT rollout_id, min(run_id) AS run_id, min(round) AS round FROM stored.rollout_identities GROUP BY ALL
) i ON i.rollout_id = """

_SOURCES: Final = {
    "spans": "stored.span_identities",
    "calls": "(SELECT * FROM stored.span_identities WHERE is_call)",
    "rollouts": "main.rollouts",
    "evaluations": f"(SELECT e.*, i.run_id, i.round FROM stored.bound_evaluations e {_OF_ROLLOUT} e.rollout_id)",
    "logs": (
        "(SELECT l.*, b.rollout_id, i.run_id, i.round FROM stored.log_rollouts b "
        f"JOIN main.logs l ON l.seq = b.seq {_OF_ROLLOUT} b.rollout_id)"
    ),
}
"""What a read's rows are chosen from: each has trace_id, rollout_id, run_id and round."""

_TOUCHED: Final = """
touched AS MATERIALIZED (
    SELECT trace_id, rollout_id FROM stored.span_identities WHERE seq > $since_seq
    UNION SELECT trace_id, rollout_id FROM stored.bound_evaluations WHERE seq > $since_seq
    UNION SELECT trace_id, rollout_id FROM stored.log_rollouts WHERE seq > $since_seq
)"""

_ALL: Final = ("since_seq", 0)


@dataclass(frozen=True, slots=True)
class Query:
    sql: str
    parameters: dict[str, object]


def named_read(name: str, parameters: Mapping[str, object]) -> Query:
    """The query of a read. Raises UsageError for a name, parameter or column that there is not.

    `without_calls`: of the spans only those that the read `calls` does not give. `without_rollout`: only what belongs to none.
    """
    if name not in READS:
        raise UsageError(f"no read {name!r}; there are {', '.join(READS)}")
    of_spans = ("without_calls",) if name == "spans" else ()
    known = ("run_id", "round", "rollout_ids", "without_rollout", "since_seq", "columns", *of_spans)
    if unknown := [key for key in parameters if key not in known]:
        raise UsageError(f"read {name!r} has no parameter {unknown[0]!r}; there are {', '.join(known)}")
    given = {key: value for key, value in parameters.items() if value is not None}
    conditions = ["true"]
    bound: dict[str, object] = {}
    if "run_id" in given:
        conditions.append("r.run_id = $run_id")
        bound["run_id"] = _checked(given, "run_id", str)
    if "round" in given:
        conditions.append("r.round = $round")
        bound["round"] = _checked(given, "round", int)
    if "rollout_ids" in given:
        conditions.append("r.rollout_id IN (SELECT unnest($rollout_ids::VARCHAR[]))")
        bound["rollout_ids"] = _texts(given, "rollout_ids")
    if "without_rollout" in given and _checked(given, "without_rollout", bool):
        conditions.append("r.rollout_id IS NULL")
    tables = []
    if "since_seq" in given:
        tables.append(_TOUCHED)
        conditions.append(
            "(r.trace_id IN (SELECT trace_id FROM touched WHERE trace_id IS NOT NULL)"
            " OR r.rollout_id IN (SELECT rollout_id FROM touched WHERE rollout_id IS NOT NULL))"
        )
        bound["since_seq"] = _checked(given, "since_seq", int)
    # Rows are chosen on narrow columns first: a plan of one piece reads every span's payload.
    tables.append(f"chosen AS MATERIALIZED (SELECT * FROM {_SOURCES[name]} r WHERE {' AND '.join(conditions)})")
    columns = ", ".join(_qualified(name, column) for column in _columns(name, given))
    payload = " JOIN stored.spans s ON s.seq = i.seq" if name in ("spans", "calls") else ""
    if "without_calls" in given and _checked(given, "without_calls", bool):
        payload += " WHERE NOT coalesce(i.is_call, false)"
    seeds = [parameter for parameter in SEEDS if parameter in bound and (parameter, bound[parameter]) != _ALL]
    if seeds:
        tables = nearby(tables, seeds[0])
    return Query(f"WITH {', '.join(tables)} SELECT {columns} FROM chosen i{payload}", bound)


def _qualified(name: str, column: str) -> str:
    from_span = name in ("spans", "calls") and column not in _IDENTITY_COLUMNS
    return f"{'s' if from_span else 'i'}.{column}"


def _columns(name: str, given: Mapping[str, object]) -> tuple[str, ...]:
    if "columns" not in given:
        return READS[name]
    wanted = _texts(given, "columns")
    if not wanted:
        raise UsageError(f"read {name!r}: columns is empty")
    if unknown := [column for column in wanted if column not in READS[name]]:
        raise UsageError(f"read {name!r} has no column {unknown[0]!r}; there are {', '.join(READS[name])}")
    return tuple(wanted)


def _checked(given: Mapping[str, object], key: str, kind: type) -> object:
    value = given[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"parameter {key} = {value!r} is not of type {kind.__name__}")
    return value


def _texts(given: Mapping[str, object], key: str) -> list[str]:
    value = given[key]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"parameter {key} = {value!r} is not a list of strings")
    return value
