"""Reads some rollouts without processing the identities of the whole store.

The views of schema.sql find a span's rollout by looking at all spans of its trace and of its rollout. Here, a query on them
is limited to the rows that can matter. It starts from seeds: rows that meet a necessary condition. A row of the answer is in
a trace of a seed, or in a trace of a seed's rollout. So the traces and rollouts of the seeds are looked up, then those that
share a trace or rollout with them, which are then complete. These scans read two narrow columns.

If rollouts are named, the identity of others in their traces does not matter, and one lookup is enough. A reader that knows
where their spans are in the store saves that, too.
"""

import functools
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

__all__ = ["PLACES", "SEEDS", "nearby"]

PLACES: Final = ("spans_within", "seen_seq")
"""Parameters of a read by rollout ids, given together: ranges [from, to] of `seq` that contain all spans of these rollouts'
traces, as of when the store's last one was `seen_seq`. Rollouts and traces that have received more since are searched for
everywhere: the new spans may determine the rollout of the older ones."""

SEEDS: Final = {
    "rollout_ids": "SELECT unnest($rollout_ids::VARCHAR[]) AS rollout_id",
    "since_seq": """
    SELECT trace_id, rollout_id FROM stored.live_spans WHERE seq > $since_seq
    UNION SELECT trace_id, rollout_id FROM stored.live_evaluations WHERE seq > $since_seq
    UNION SELECT trace_id, rollout_id FROM stored.logs WHERE seq > $since_seq""",
    "task_id": "SELECT DISTINCT rollout_id FROM stored.spans WHERE task_id = $task_id AND rollout_id IS NOT NULL",
    "round_without_rollout": (
        "SELECT trace_id, rollout_id FROM stored.live_spans WHERE rollout_id IS NULL AND round = $round"
    ),
    "without_rollout": "SELECT trace_id, rollout_id FROM stored.live_spans WHERE rollout_id IS NULL",
    "round": "SELECT trace_id, rollout_id FROM stored.live_spans WHERE round = $round",
}
"""A read's parameter, the most selective first → SQL of the traces and rollouts stated by the spans that meet it.

Those without a rollout are only for reads of spans: an evaluation without a rollout may have no trace either. `round` and
`without_rollout` together are `round_without_rollout`: no rollout completes such a span's round."""

_NAMING: Final = ("rollout_ids", "task_id")
"""Those that name rollouts; `task_id` is for reads of rollouts, whose task is one that their own spans state."""

_COLUMNS: Final = (
    "seq, trace_id, span_id, is_call, rollout_id, attempt, task_id, run_id, round, split, untrusted, rollout_status,"
    " rollout_boundary, rollout_judge, rollout_calls, own_reward, start_ns, end_ns"
)
"""The columns of a span that the views use; its payload is joined to the selected rows."""

_TOUCHING: Final = f"""
said AS NOT MATERIALIZED (
    SELECT trace_id, rollout_id FROM stored.spans
    UNION ALL SELECT trace_id, rollout_id FROM stored.evaluations
    UNION ALL SELECT trace_id, rollout_id FROM stored.logs
),
seeds AS MATERIALIZED ({{seeds}}),
seed_traces AS (SELECT trace_id FROM seeds WHERE trace_id IS NOT NULL),
seed_rollouts AS MATERIALIZED (
    SELECT rollout_id FROM seeds WHERE rollout_id IS NOT NULL
    UNION SELECT rollout_id FROM said WHERE rollout_id IS NOT NULL AND trace_id IN (FROM seed_traces)
),
met_traces AS MATERIALIZED (
    FROM seed_traces
    UNION SELECT trace_id FROM said WHERE trace_id IS NOT NULL AND rollout_id IN (FROM seed_rollouts)
),
some_rollouts AS MATERIALIZED (
    FROM seed_rollouts
    UNION SELECT rollout_id FROM said WHERE rollout_id IS NOT NULL AND trace_id IN (FROM met_traces)
),
some_traces AS MATERIALIZED (
    FROM met_traces
    UNION SELECT trace_id FROM said WHERE trace_id IS NOT NULL AND rollout_id IN (FROM some_rollouts)
),
some_spans AS MATERIALIZED (SELECT {_COLUMNS} FROM stored.spans WHERE trace_id IN (FROM some_traces)),
near_live_spans AS MATERIALIZED (FROM some_spans s ANTI JOIN stored.superseded d ON d.seq = s.seq),"""
_NAMED: Final = f"""
some_rollouts AS MATERIALIZED ({{seeds}}),
some_traces AS MATERIALIZED (
    SELECT trace_id FROM stored.spans WHERE rollout_id IN (FROM some_rollouts)
    UNION SELECT trace_id FROM stored.evaluations WHERE trace_id IS NOT NULL AND rollout_id IN (FROM some_rollouts)
    UNION SELECT trace_id FROM stored.logs WHERE trace_id IS NOT NULL AND rollout_id IN (FROM some_rollouts)
),
some_spans AS MATERIALIZED (SELECT {_COLUMNS} FROM stored.spans WHERE trace_id IN (FROM some_traces)),
near_live_spans AS MATERIALIZED (FROM some_spans s ANTI JOIN stored.superseded d ON d.seq = s.seq),"""
_PLACED: Final = f"""
some_rollouts AS MATERIALIZED ({SEEDS["rollout_ids"]}),
changed_rollouts AS MATERIALIZED (
    SELECT DISTINCT rollout_id FROM stored.spans WHERE seq > $seen_seq AND rollout_id IN (FROM some_rollouts)
),
known_traces AS MATERIALIZED (
    SELECT DISTINCT trace_id FROM stored.spans WHERE ({{within}}) AND rollout_id IN (FROM some_rollouts)
),
changed_traces AS MATERIALIZED (
    SELECT trace_id FROM stored.spans WHERE rollout_id IN (FROM changed_rollouts)
    UNION SELECT trace_id FROM stored.spans WHERE seq > $seen_seq AND trace_id IN (FROM known_traces)
),
same_traces AS MATERIALIZED (FROM known_traces EXCEPT FROM changed_traces),
some_traces AS MATERIALIZED (FROM same_traces UNION ALL FROM changed_traces),
changed_spans AS MATERIALIZED (SELECT {_COLUMNS} FROM stored.spans WHERE trace_id IN (FROM changed_traces)),
near_live_spans AS MATERIALIZED (
    SELECT {_COLUMNS} FROM stored.spans s ANTI JOIN stored.superseded d ON d.seq = s.seq
    WHERE ({{within}}) AND trace_id IN (FROM same_traces)
    UNION ALL FROM changed_spans s ANTI JOIN stored.superseded d ON d.seq = s.seq
),"""
_NEAR: Final = """
some_evaluations AS MATERIALIZED (
    SELECT seq FROM stored.evaluations WHERE trace_id IN (FROM some_traces)
    UNION SELECT seq FROM stored.evaluations WHERE rollout_id IN (FROM some_rollouts)
),
near_evaluations AS MATERIALIZED (SELECT * FROM stored.evaluations WHERE seq IN (FROM some_evaluations)),
near_live_evaluations AS MATERIALIZED (FROM near_evaluations e ANTI JOIN stored.superseded d ON d.seq = e.seq),
near_logs AS MATERIALIZED (
    SELECT seq, trace_id, rollout_id FROM stored.logs WHERE trace_id IN (FROM some_traces)
    UNION SELECT seq, trace_id, rollout_id FROM stored.logs WHERE rollout_id IN (FROM some_rollouts)
)"""
_BASES: Final = ("live_spans", "live_evaluations", "logs")
_DERIVED: Final = (
    "trace_rollouts", "rollout_identities", "span_identities", "bound_evaluations", "log_rollouts", "rollouts",
)  # fmt: skip
_NAME: Final = re.compile(rf"\b(?:stored\.({'|'.join((*_BASES, *_DERIVED))})|main\.(rollouts))\b")


def nearby(tables: Sequence[str], parameter: str, places: Sequence[tuple[int, int]] | None = None) -> list[str]:
    """A query's common table expressions, which name views with their schema, limited to what is near the seeds.

    `parameter` is one of SEEDS, with its values bound in the query; `places`, the ranges of PLACES, is only for rollout ids.
    """
    if places is None:
        some = (_NAMED if parameter in _NAMING else _TOUCHING).format(seeds=SEEDS[parameter])
    else:
        within = " OR ".join(("seq > $seen_seq", *(f"seq BETWEEN {first:d} AND {last:d}" for first, last in places)))
        some = _PLACED.format(within=within)
    return [some + _NEAR, *_derived(), *map(_local, tables)]


@functools.cache
def _derived() -> list[str]:
    """The views of schema.sql as common table expressions."""
    schema = files("trainspan_collector.store").joinpath("schema.sql").read_text()
    views = dict(
        re.findall(r"^CREATE OR REPLACE VIEW (?:stored\.)?(\w+) AS\n(.*?);$", schema, re.MULTILINE | re.DOTALL)
    )
    return [f"near_{name} AS ({_local(views[name])})" for name in _DERIVED]


def _local(sql: str) -> str:
    return _NAME.sub(lambda found: f"near_{found[1] or found[2]}", sql)
