"""Reads some rollouts without processing the identities of the whole store.

The views of schema.sql find a span's rollout by looking at all spans of its trace and of its rollout. Here, a query on them
is limited to the rows that can matter. It starts from seeds: rows that meet a necessary condition. A row of the answer is in
a trace of a seed, or in a trace of a seed's rollout. So the traces and rollouts of the seeds are looked up, then those that
share a trace or rollout with them, which are then complete. These scans read two narrow columns.

If rollouts are named, the identity of others in their traces does not matter, and one lookup is enough; all scans are limited
to the places of these traces (places.py).
"""

import functools
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from trainspan_collector.query.places import EVERYWHERE, NOWHERE

__all__ = ["NAMING", "SEEDS", "nearby"]

SEEDS: Final = {
    "rollout_ids": "SELECT unnest($rollout_ids::VARCHAR[]) AS rollout_id",
    "since_seq": """
    SELECT trace_id, rollout_id FROM stored.live_spans WHERE seq > $since_seq
    UNION SELECT trace_id, rollout_id FROM stored.live_evaluations WHERE seq > $since_seq
    UNION SELECT trace_id, rollout_id FROM stored.logs WHERE seq > $since_seq""",
    **dict.fromkeys(("branches_of", "task_id"), "SELECT unnest($task_rollouts::VARCHAR[]) AS rollout_id"),
    "round_without_rollout": (
        "SELECT trace_id, rollout_id FROM stored.live_spans WHERE rollout_id IS NULL AND round = $round AND {within}"
    ),
    "without_rollout": "SELECT trace_id, rollout_id FROM stored.live_spans WHERE rollout_id IS NULL AND {within}",
    "round": "SELECT trace_id, rollout_id FROM stored.live_spans WHERE round = $round",
}
"""A read's parameter, the most selective first → SQL of the traces and rollouts stated by the spans that meet it.

Those without a rollout are only for reads of spans: an evaluation without a rollout may have no trace either. `round` and
`without_rollout` together are `round_without_rollout`: no rollout completes such a span's round. `{within}`: where these
spans are."""

NAMING: Final = ("rollout_ids", "branches_of", "task_id")
"""Those that name rollouts; the last two are for reads of rollouts, whose task is one that their own spans state."""

_COLUMNS: Final = (
    "seq, trace_id, span_id, is_call, rollout_id, attempt, task_id, run_id, round, split, untrusted, rollout_status,"
    " rollout_boundary, rollout_judge, rollout_calls, own_reward, start_ns, end_ns, collides"
)
"""The columns of a span that the views use; its payload is joined to the selected rows."""

_TOUCHING: Final = """
stated_ids AS NOT MATERIALIZED (
    SELECT trace_id, rollout_id FROM stored.spans WHERE {within}
    UNION ALL SELECT trace_id, rollout_id FROM stored.evaluations WHERE {within}
    UNION ALL SELECT trace_id, rollout_id FROM stored.logs WHERE {within}
),
seeds AS MATERIALIZED ({seeds}),
seed_traces AS (SELECT trace_id FROM seeds WHERE trace_id IS NOT NULL),
seed_rollouts AS MATERIALIZED (
    SELECT rollout_id FROM seeds WHERE rollout_id IS NOT NULL
    UNION SELECT rollout_id FROM stated_ids WHERE rollout_id IS NOT NULL AND trace_id IN (FROM seed_traces)
),
met_traces AS MATERIALIZED (
    FROM seed_traces
    UNION SELECT trace_id FROM stated_ids WHERE trace_id IS NOT NULL AND rollout_id IN (FROM seed_rollouts)
),
some_rollouts AS MATERIALIZED (
    FROM seed_rollouts
    UNION SELECT rollout_id FROM stated_ids WHERE rollout_id IS NOT NULL AND trace_id IN (FROM met_traces)
),
some_traces AS MATERIALIZED (
    FROM met_traces
    UNION SELECT trace_id FROM stated_ids WHERE trace_id IS NOT NULL AND rollout_id IN (FROM some_rollouts)
),"""
_NAMED: Final = """
some_rollouts AS MATERIALIZED ({seeds}),
some_traces AS MATERIALIZED (
    SELECT trace_id FROM stored.spans WHERE {within} AND rollout_id IN (FROM some_rollouts)
    UNION SELECT trace_id FROM stored.evaluations
    WHERE {within} AND trace_id IS NOT NULL AND rollout_id IN (FROM some_rollouts)
    UNION SELECT trace_id FROM stored.logs
    WHERE {within} AND trace_id IS NOT NULL AND rollout_id IN (FROM some_rollouts)
),"""
_NEAR: Final = f"""
near_live_spans AS MATERIALIZED (
    SELECT {_COLUMNS} FROM stored.spans WHERE {{within}} AND trace_id IN (FROM some_traces)
    AND seq NOT IN (SELECT seq FROM stored.superseded WHERE seq IS NOT NULL)
),
some_evaluations AS MATERIALIZED (
    SELECT seq FROM stored.evaluations WHERE {{within}} AND trace_id IN (FROM some_traces)
    UNION SELECT seq FROM stored.evaluations WHERE {{within}} AND rollout_id IN (FROM some_rollouts)
),
near_evaluations AS MATERIALIZED (SELECT * FROM stored.evaluations WHERE {{within}} AND seq IN (FROM some_evaluations)),
near_live_evaluations AS MATERIALIZED (FROM near_evaluations e ANTI JOIN stored.superseded d ON d.seq = e.seq),
near_logs AS MATERIALIZED (
    SELECT seq, trace_id, rollout_id FROM stored.logs WHERE {{within}} AND trace_id IN (FROM some_traces)
    UNION SELECT seq, trace_id, rollout_id FROM stored.logs WHERE {{within}} AND rollout_id IN (FROM some_rollouts)
),"""
_BASES: Final = ("live_spans", "live_evaluations", "logs")
_DERIVED: Final = (
    "statements", "trace_rollouts", "rollout_identities", "span_identities", "bound_evaluations", "log_rollouts", "rollouts",
)  # fmt: skip
_NAME: Final = re.compile(rf"\b(?:stored\.({'|'.join((*_BASES, *_DERIVED))})|main\.(rollouts))\b")
_WORD: Final = re.compile(r"\w+")
_EXPRESSION: Final = re.compile(r"^(\w+) AS .*?(?=^\w+ AS |\Z)", re.MULTILINE | re.DOTALL)


def nearby(tables: Sequence[str], parameter: str, within: str) -> list[str]:
    """A query's common table expressions, which name views with their schema, limited to what is near the seeds.

    `parameter` is one of SEEDS, with its values bound in the query. `within` is a condition on `seq` that holds for the traces
    of named rollouts, or for the spans without a rollout.
    """
    is_naming = parameter in NAMING
    seeds = SEEDS[parameter].format(within=within)
    everything = within if is_naming or within == NOWHERE else EVERYWHERE
    near = ((_NAMED if is_naming else _TOUCHING) + _NEAR).format(seeds=seeds, within=everything)
    views = [_local(table) for table in tables]
    return [*_needed([*_expressions(near), *_derived()], views), *views]


def _needed(expressions: Sequence[tuple[str, str]], by: Sequence[str]) -> list[str]:
    """The expressions that `by` names, directly or through others, in their order: DuckDB's planning of the rest takes longer than
    reading a few rollouts."""
    words = {word for sql in by for word in _WORD.findall(sql)}
    needed: list[str] = []
    for name, sql in reversed(expressions):
        if name in words:
            needed.append(sql)
            words.update(_WORD.findall(sql))
    return needed[::-1]


def _expressions(sql: str) -> list[tuple[str, str]]:
    """Common table expressions, each of which begins a line, and their names."""
    return [(match[1], match[0].strip().removesuffix(",")) for match in _EXPRESSION.finditer(sql)]


@functools.cache
def _derived() -> list[tuple[str, str]]:
    """The views of schema.sql as common table expressions."""
    schema = files("trainspan_collector.store").joinpath("schema.sql").read_text()
    views = dict(re.findall(r"^CREATE VIEW (?:stored\.)?(\w+) AS\n(.*?);$", schema, re.MULTILINE | re.DOTALL))
    return [(f"near_{name}", f"near_{name} AS ({_local(views[name])})") for name in _DERIVED]


def _local(sql: str) -> str:
    return _NAME.sub(lambda match: f"near_{match[1] or match[2]}", sql)
