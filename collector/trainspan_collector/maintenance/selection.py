"""Selects what to delete from a store: traces and rollouts, by id, task or age, and their rows.

A trace is deleted as a whole. So is a rollout if all of its traces are, with the evaluations and log records that name it.
A trace with rollouts of several tasks loses only the spans of the chosen ones. Rows without a trace are deleted by their own age.
By age nothing of a rollout that a person has labeled is deleted, and no label: only a purge by trace or task does that.
"""

from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa

from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.errors import UsageError
from trainspan_schemas.store.labels import newest, read_label
from trainspan_schemas.telemetry import keys

__all__ = ["GONE", "Criteria", "TraceSelection", "select"]

GONE: Final = """(
    seq IS NOT NULL AND (
        coalesce(trace_id IN (SELECT trace_id FROM gone_traces), false)
        OR coalesce(rollout_id IN (SELECT rollout_id FROM gone_rollouts), false)
        OR (trace_id IS NULL AND received_ns < $before_ns
            AND NOT coalesce(rollout_id IN (SELECT rollout_id FROM labeled_rollouts), false))
    )
)"""
"""SQL: whether a row of `stored.spans`, `logs` or `evaluations` is selected; use after `TraceSelection.register`, with `parameters`."""

_ROLLOUTS_WHOLLY_IN_TRACES: Final = """
SELECT rollout_id FROM stored.span_identities WHERE rollout_id IS NOT NULL
GROUP BY rollout_id HAVING bool_and(trace_id IN (SELECT trace_id FROM gone_traces))
"""
_LABELED: Final = f"""
SELECT DISTINCT rollout_id FROM (
    SELECT rollout_id, score FROM stored.live_evaluations
    WHERE source = '{keys.LABEL}' AND NOT untrusted AND rollout_id IS NOT NULL
    QUALIFY row_number() OVER (
        PARTITION BY rollout_id, attempt, name, trace_id, span_id ORDER BY time_ns DESC, score DESC NULLS LAST
    ) = 1
) WHERE score IS NOT NULL
"""
"""The table does not name the other rollout of a preference: `_labeled` adds what stands of each pair."""
_PREFERENCES: Final = f"""
SELECT time_ns, rollout_id, trace_id, span_id, attributes FROM stored.live_logs
WHERE event_name = '{keys.EVALUATION_EVENT}' AND NOT untrusted AND contains(attributes, '"{keys.LABEL_OTHER}"')
"""
_ROWS_AT_ONCE: Final = 10_000
_OLD_TRACES: Final = """
SELECT trace_id FROM (
    SELECT trace_id, received_ns FROM stored.spans WHERE trace_id IS NOT NULL
    UNION ALL SELECT trace_id, received_ns FROM stored.logs WHERE trace_id IS NOT NULL
    UNION ALL SELECT trace_id, received_ns FROM stored.evaluations WHERE trace_id IS NOT NULL
) WHERE trace_id NOT IN (
    SELECT trace_id FROM stored.spans
    WHERE trace_id IS NOT NULL AND rollout_id IN (SELECT rollout_id FROM labeled_rollouts)
) GROUP BY trace_id HAVING max(received_ns) < $before_ns
"""
_OF_TASK: Final = f"(task_id = $task_id OR regexp_replace(task_id, '{BRANCH_TASK}', '') = $task_id)"
"""Branches of its rollouts included: they repeat the same prompts and answers."""
_TASK_ROLLOUTS: Final = f"SELECT DISTINCT rollout_id FROM stored.rollout_identities WHERE {_OF_TASK}"
_TASK_TRACES: Final = f"""
SELECT trace_id FROM stored.span_identities GROUP BY trace_id
HAVING bool_or({_OF_TASK}) AND bool_and(coalesce({_OF_TASK}, rollout_id IS NULL))
"""


@dataclass(frozen=True, slots=True)
class Criteria:
    """The one criterion of a deletion. Raises UsageError unless exactly one is set, and if a trace id is invalid."""

    trace_ids: tuple[str, ...] = ()
    """Trace ids, 32 lowercase hex digits each."""
    task_id: str | None = None
    before_ns: int | None = None
    """Traces whose newest row the collector received before this time."""

    def __post_init__(self) -> None:
        if sum((bool(self.trace_ids), self.task_id is not None, self.before_ns is not None)) != 1:
            raise UsageError("select what to delete in exactly one way: by trace, task or time")
        for trace_id in self.trace_ids:
            if len(trace_id) != 32 or set(trace_id) - set("0123456789abcdef"):
                raise UsageError(f"trace id {trace_id!r} is not 32 lower-case hex digits")


@dataclass(frozen=True, slots=True)
class TraceSelection:
    """Selected traces and rollouts, as single-column tables of ids."""

    traces: pa.Table
    rollouts: pa.Table
    labeled: pa.Table
    """Rollouts that are not deleted by age, since a person has labeled them."""
    before_ns: int

    @property
    def trace_ids(self) -> list[str]:
        ids: list[str] = self.traces["trace_id"].to_pylist()
        return ids

    @property
    def parameters(self) -> dict[str, object]:
        return {"before_ns": self.before_ns}

    def register(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Makes the ids available to statements on `cursor`."""
        cursor.register("gone_traces", self.traces)
        cursor.register("gone_rollouts", self.rollouts)
        cursor.register("labeled_rollouts", self.labeled)


def select(cursor: duckdb.DuckDBPyConnection, criteria: Criteria) -> TraceSelection:
    """Applies `criteria` to the rows that `cursor` sees."""
    parameters: dict[str, object] = {}
    labeled = _labeled(cursor)
    cursor.register("labeled_rollouts", labeled)
    if criteria.task_id is not None:
        parameters = {"task_id": criteria.task_id}
        traces = _ids(cursor, _TASK_TRACES, parameters)
        return TraceSelection(traces, _ids(cursor, _TASK_ROLLOUTS, parameters), labeled, 0)
    if criteria.before_ns is not None:
        parameters = {"before_ns": criteria.before_ns}
        traces = _ids(cursor, _OLD_TRACES, parameters)
    else:
        traces = pa.table({"trace_id": pa.array(criteria.trace_ids, pa.string())})
    cursor.register("gone_traces", traces)
    return TraceSelection(traces, _ids(cursor, _ROLLOUTS_WHOLLY_IN_TRACES, {}), labeled, criteria.before_ns or 0)


def _labeled(cursor: duckdb.DuckDBPyConnection) -> pa.Table:
    """The rollouts with a label, and those of the pairs with one, that is not withdrawn."""
    rows = cursor.execute(_PREFERENCES)
    labels = (
        read_label(time_ns, rollout_id, (trace_id, span_id), attributes, untrusted=False)
        for some in iter(lambda: rows.fetchmany(_ROWS_AT_ONCE), [])
        for time_ns, rollout_id, trace_id, span_id, attributes in some
    )
    pairs = newest(label for label in labels if label is not None and label.other is not None).values()
    ids: set[str] = set(_ids(cursor, _LABELED, {})["rollout_id"].to_pylist())
    ids |= {
        rollout_id
        for label in pairs
        if label.other is not None and not label.is_withdrawn
        for rollout_id in (label.rollout_id, label.other[0])
    }
    return pa.table({"rollout_id": pa.array(sorted(ids), pa.string())})


def _ids(cursor: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, object]) -> pa.Table:
    return cursor.sql(sql, params=parameters).to_arrow_table()
