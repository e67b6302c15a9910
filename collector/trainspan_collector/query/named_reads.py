"""Named reads of Flight: names and parameters → one SQL query with bound values.

Three of them are for readers that process a large store piece by piece: `holdings` returns what the store has of each rollout
and where, `tokens` returns the tokens of calls by their `seq` alone, and `texts` the attributes of spans. `records` returns log
records by their event. `newest` and `activity` are for those who watch: their cost does not depend on the size of the store.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from trainspan_collector.query.places import EVERYWHERE, RowPlaces
from trainspan_collector.query.read_parameters import ReadParameters
from trainspan_collector.query.scoped_views import NAMING, SEEDS, nearby
from trainspan_collector.rows.promoted import PROMOTED
from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.errors import UsageError
from trainspan_schemas.store.views import IDENTITY, VIEWS

__all__ = ["ACTIVITY", "FOREIGN", "HOLDINGS", "NEWEST", "READS", "SIZES", "TEXTS", "TOKENS", "Query", "named_read"]

_EXTRAS: Final = {
    "spans": (
        *("attempt", "task_id", "run_id", "round", "split", "agent"),
        *("rollout_status", "rollout_boundary", "rollout_judge", "rollout_calls"),
        *("is_call", "call_index", "policy_name", "policy_version", "finish_reason", "delivered", "n_tokens"),
        *PROMOTED,
        *("last_call", "collides", "received_ns"),
    ),
    "calls": (
        *("parent_span_id", "status_code", "attributes", "resource", "scope_name", "dropped_attributes", "n_tokens"),
        *PROMOTED,
        "received_ns",
    ),
    "evaluations": ("attempt", "of", "on_span", "last_call", "about_response"),
}
"""Columns of a read beyond those of its view. The identity of a span is completed like that of a call.
`n_tokens` is the number of tokens in a call's prompt and answer together.
`of` is what the evaluation claims to judge (`trainspan.evaluation.of`)."""

READS: Final[Mapping[str, tuple[str, ...]]] = {
    name: (*columns, *_EXTRAS.get(name, ())) for name, columns in VIEWS.items()
}
"""Read → its columns."""

HOLDINGS: Final = (
    *("rollout_id", "attempt", "trace_id", "run_id", "round", "task_id"),
    *("calls", "spans", "first_seq", "last_seq", "is_selected"),
)
"""Columns of the read `holdings`: a row for each rollout, trace, identity and stretch of the store, with the number of calls
with tokens and of other spans there, and their first and last `seq`. It takes the parameters of `calls`. In the traces of
rollouts with selected rows, it also returns the rows that are not selected (`is_selected`)."""

FOREIGN: Final = ("rollout_id", "seq")
"""Columns of the read `foreign`: the rollouts with evaluations but no span in this store, whose run and round it does not know, and
the `seq` of their first evaluation."""

TOKENS: Final = ("seq", "trace_id", "span_id", "prompt_ids", "completion_ids", "logprobs", "call_facts")
"""Columns of the read `tokens`: the calls whose `seq` is in `seqs`, even if a richer duplicate has arrived since."""

TEXTS: Final = ("seq", "trace_id", "span_id", "name", "service_name", "scope_name", "attributes")
"""Columns of the read `texts`: the spans whose `seq` is in `seqs`, or those of the traces `trace_ids`."""

NEWEST: Final = {
    **dict.fromkeys(("seq", "trace_id", "rollout_id", "attempt", "run_id", "round", "split"), ""),
    **dict.fromkeys(("task_id", "agent", "policy_name", "name", "service_name"), "left({}, 300)"),
    **dict.fromkeys(("status_message", "finish_reason"), "left({}, 300)"),
    **dict.fromkeys(("is_call", "call_index", "policy_version", "delivered", "call_facts", "status_code"), ""),
    **dict.fromkeys(("start_ns", "end_ns", "rollout_status", "rollout_calls", "untrusted"), ""),
    "n_tokens": "coalesce(len(prompt_ids), 0) + coalesce(len(completion_ids), 0)",
}
"""Column of the read `newest` → SQL expression if it is not just the column: a row for each span among the last `rows` rows of
the store. The identity is what the span itself states; texts are cut to 300 characters."""
_MOST_NEWEST: Final = 10_000

ACTIVITY: Final = ("calls", "tokens", "rollouts")
"""Columns of the read `activity`: one row with the numbers of calls, of their tokens, and of rollouts that ended at `since_ns`
(Unix time) or later."""

SIZES: Final = (
    *("rollout_id", "spans", "calls", "evaluations", "logs", "tokens", "text_bytes"),
    *("all_rollouts", "all_spans"),
)
"""Columns of the read `sizes`: a row for each rollout, the one with the most spans first, at most `rows` of them. `spans` counts
its calls too; `text_bytes` is the size of the attributes of its spans and of its log records; `all_rollouts` and `all_spans` count
those of all selected rollouts, also of those without a row."""
_MOST_SIZES: Final = 10_000
_MOST_PAGE: Final = 10_000
_PAGED: Final = ("attempt", "skip", "rows")
"""Parameters of the reads `spans` and `calls` that ask for a part: `rows` of them after the first `skip`, by start and `seq`,
with the column `n_selected`, the number of all."""

_STRETCH: Final = 2048
"""Width in `seq`: about a row group."""

_OF_ROLLOUT: Final = """
LEFT JOIN (
    SELECT rollout_id, min(run_id) AS run_id, min(round) AS round
    FROM stored.rollout_identities
    SEMI JOIN (
        SELECT rollout_id, max(standing) AS standing FROM stored.rollout_identities GROUP BY rollout_id
    ) USING (rollout_id, standing)
    GROUP BY rollout_id
) i ON i.rollout_id = """

_SOURCES: Final = {
    "spans": "stored.span_identities",
    "calls": "(SELECT * FROM stored.span_identities WHERE is_call)",
    "rollouts": "main.rollouts",
    "evaluations": f"(SELECT e.*, i.run_id, i.round FROM stored.bound_evaluations e {_OF_ROLLOUT} e.rollout_id)",
    "logs": (
        "(SELECT l.* EXCLUDE (rollout_id), b.rollout_id, i.run_id, i.round FROM stored.live_logs l "
        f"JOIN stored.log_rollouts b ON b.seq = l.seq {_OF_ROLLOUT} b.rollout_id)"
    ),
}
"""The relations from which a read's rows are selected: each has trace_id, rollout_id, run_id and round."""

_TOUCHED: Final = """
touched AS MATERIALIZED (
    SELECT trace_id, rollout_id FROM stored.span_identities WHERE seq > $since_seq
    UNION SELECT trace_id, rollout_id FROM stored.bound_evaluations WHERE seq > $since_seq
    UNION SELECT trace_id, rollout_id FROM stored.log_rollouts WHERE seq > $since_seq
)"""

_ALL: Final = ("since_seq", 0)
_OF_SPANS: Final = ("spans", "calls")

_WITHOUT: Final = {"without_run": "run_id", "without_round": "round"}
"""Parameters of the read `sizes` for rollouts that have none."""

_TASK_SPANS: Final = {
    "task_id": "task_id = $task_id",
    # The runner states it on the rollout span; looking into the text of all other spans would take longer.
    "branches_of": "rollout_status IS NOT NULL AND contains(task_id, '@' || $branches_of || '.')",
}
"""Parameter → condition on a span that states the task of such a rollout."""
_OF_TASKS: Final = {
    "task_id": _TASK_SPANS["task_id"],
    "branches_of": f"contains(task_id, '@' || $branches_of || '.') AND regexp_matches(task_id, '{BRANCH_TASK}')",
}
"""Parameter → condition on the task of a rollout."""

_CHOOSING: Final = ("run_id", "round", "rollout_ids", "without_rollout", "since_seq")
"""Parameters of every read of a view."""


@dataclass(frozen=True, slots=True)
class Query:
    sql: str
    parameters: dict[str, object]


def named_read(name: str, parameters: Mapping[str, object], places: RowPlaces) -> Query:
    """Returns the query of a read. Raises UsageError if the read, a parameter or a column is unknown.

    `places` locates rows in the store to be read. `task_id`: only the rollouts of this task; `branches_of`: only the branches
    of this rollout.
    `without_run`, `without_round`, for sizes: only rollouts without a run or round.
    `without_calls`: only spans that the read `calls` does not return. `without_rollout`: only rows without a rollout.
    `trusted`, for rollouts and records: only those whose sender may send them.
    `skip` and `rows`, for spans and calls: only a part, in the order of their start.
    """
    special = {
        "holdings": _holdings,
        "foreign": _foreign,
        "tokens": _tokens,
        "texts": _texts_of_spans,
        "records": _records,
        "newest": _newest,
        "activity": _activity,
        "sizes": _sizes,
    }
    if name not in READS and name not in special:
        raise UsageError(f"unknown read {name!r}; reads are {', '.join((*READS, *special))}")
    given = ReadParameters(name, {key: value for key, value in parameters.items() if value is not None})
    if name in special:
        return special[name](given, places)
    of_spans = ("without_calls",) if name == "spans" else ()
    of_rollouts = (*_OF_TASKS, "trusted") if name == "rollouts" else ()
    of_parts = _PAGED if name in _OF_SPANS else ()
    given.expect(*_CHOOSING, "columns", *of_spans, *of_rollouts, *of_parts)
    bound: dict[str, object] = {}
    tables = []
    conditions = _conditions(given, bound)
    if "since_seq" in given:
        tables.append(_TOUCHED)
    if given.flag("without_calls"):
        conditions.append("NOT coalesce(is_call, false)")
    # Rows are selected on narrow columns first: a single-step plan reads every span's payload.
    chosen = f"SELECT * FROM {_SOURCES[name]} r WHERE {' AND '.join(conditions)}"
    tables.append(f"chosen AS MATERIALIZED ({chosen})")
    columns = ", ".join(_qualified(name, column) for column in given.columns(READS[name]))
    order = ""
    if any(key in given for key in ("skip", "rows")):
        tables.append(_part(given, bound))
        columns, order = f"{columns}, i.n_selected", " ORDER BY i.from_ns, i.seq"
    near, within = _near(tables, given, bound, places)
    # A filter of its own makes the scan read only the payload that the join needs; `within` keeps it to a part of the store.
    of_kind = {"calls": "is_call AND ", "spans": ""}
    rows = "part" if order else "chosen"
    payload = "chosen i"
    if name in of_kind:
        payload = f"(FROM stored.spans WHERE {of_kind[name]}{within}) s JOIN {rows} i ON i.seq = s.seq"
    return Query(f"WITH {', '.join(near)} SELECT {columns} FROM {payload}{order}", bound)


def _part(given: ReadParameters, bound: dict[str, object]) -> str:
    """The table of the chosen rows that were asked for by number."""
    bound["skip"] = given.integer_within("skip", 0, 0, 2**62)
    bound["rows"] = given.integer_within("rows", _MOST_PAGE, 1, _MOST_PAGE)
    return """
part AS MATERIALIZED (
    SELECT c.*, l.start_ns AS from_ns, (SELECT count(*) FROM chosen) AS n_selected
    FROM chosen c JOIN stored.live_spans l ON l.seq = c.seq
    ORDER BY l.start_ns, c.seq LIMIT $rows OFFSET $skip
)"""


def _sizes(given: ReadParameters, places: RowPlaces) -> Query:
    given.expect("run_id", "round", "task_id", "rollout_ids", "rows", "columns", *_WITHOUT)
    bound: dict[str, object] = {}
    conditions = ["r.rollout_id IS NOT NULL", *_conditions(given, bound)]
    rows = given.integer_within("rows", _MOST_SIZES, 1, _MOST_SIZES)
    wanted = given.columns(SIZES)
    # Each of these scans something that is wide or large, so it is left out unless it is asked for.
    others = {
        "evaluations": "SELECT rollout_id, count(*) AS evaluations FROM stored.bound_evaluations GROUP BY rollout_id",
        "logs": "SELECT rollout_id, count(*) AS logs FROM stored.log_rollouts GROUP BY rollout_id",
        "tokens": (
            "SELECT i.rollout_id, sum(coalesce(len(s.prompt_ids), 0) + coalesce(len(s.completion_ids), 0)) AS tokens"
            " FROM stored.spans s JOIN chosen i ON i.seq = s.seq GROUP BY i.rollout_id"
        ),
        "text_bytes": (
            "SELECT rollout_id, sum(text_bytes) AS text_bytes FROM ("
            "SELECT i.rollout_id, strlen(s.attributes) AS text_bytes FROM stored.spans s JOIN chosen i ON i.seq = s.seq"
            " UNION ALL SELECT b.rollout_id, coalesce(strlen(l.attributes), 0) + coalesce(strlen(l.body), 0)"
            " FROM stored.live_logs l JOIN stored.log_rollouts b ON b.seq = l.seq) GROUP BY rollout_id"
        ),
    }
    joined = [name for name in others if name in wanted]
    tables = [
        f"chosen AS MATERIALIZED (SELECT * FROM stored.span_identities r WHERE {' AND '.join(conditions)})",
        """
sized AS MATERIALIZED (
    SELECT rollout_id, count(*) AS spans, count(*) FILTER (is_call) AS calls,
        count(*) OVER () AS all_rollouts, sum(count(*)) OVER () AS all_spans
    FROM chosen GROUP BY rollout_id
)""",
        *(f"{name}_of AS ({others[name]})" for name in joined),
    ]
    columns = ", ".join(
        f"coalesce({name}_of.{name}, 0)::BIGINT AS {name}" if name in joined else _whole(name) for name in wanted
    )
    joins = "".join(f" LEFT JOIN {name}_of ON {name}_of.rollout_id = z.rollout_id" for name in joined)
    near, _ = _near(tables, given, bound, places)
    order = f"ORDER BY z.spans DESC, z.rollout_id LIMIT {rows}"
    return Query(f"WITH {', '.join(near)} SELECT {columns} FROM sized z{joins} {order}", bound)


def _whole(name: str) -> str:
    return "z.rollout_id" if name == "rollout_id" else f"z.{name}::BIGINT AS {name}"


def _holdings(given: ReadParameters, places: RowPlaces) -> Query:
    given.expect(*_CHOOSING, "task_id", "columns")
    bound: dict[str, object] = {}
    conditions = _conditions(given, bound)
    tables = [_TOUCHED] if "since_seq" in given else []
    tables += [
        f"""
stretches AS MATERIALIZED (
    SELECT
        rollout_id, attempt, trace_id, run_id, round, task_id,
        count(*) FILTER (is_call)::INTEGER AS calls, count(*)::INTEGER - calls AS spans,
        min(seq) AS first_seq, max(seq) AS last_seq
    FROM stored.span_identities
    WHERE rollout_id IS NOT NULL
    GROUP BY rollout_id, attempt, trace_id, run_id, round, task_id, seq // {_STRETCH}
)""",
        f"chosen AS MATERIALIZED (SELECT *, coalesce({' AND '.join(conditions)}, false) AS is_selected FROM stretches r)",
    ]
    columns = ", ".join(given.columns(HOLDINGS))
    near, _ = _near(tables, given, bound, places)
    return Query(
        f"""
WITH {", ".join(near)}
SELECT {columns} FROM chosen
WHERE trace_id IN (
    SELECT trace_id FROM chosen WHERE rollout_id IN (SELECT rollout_id FROM chosen WHERE is_selected)
)""",
        bound,
    )


def _foreign(given: ReadParameters, _: RowPlaces) -> Query:
    given.expect("columns")
    columns = ", ".join(f"j.{column}" for column in given.columns(FOREIGN))
    # Of joined tables the right one is held in memory: never the spans.
    return Query(
        f"""
WITH judged AS MATERIALIZED (
    SELECT rollout_id, min(seq) AS seq FROM stored.live_evaluations WHERE rollout_id IS NOT NULL GROUP BY rollout_id
),
here AS (SELECT DISTINCT s.rollout_id FROM stored.spans s SEMI JOIN judged j ON j.rollout_id = s.rollout_id)
SELECT {columns} FROM judged j ANTI JOIN here h ON h.rollout_id = j.rollout_id""",
        {},
    )


def _tokens(given: ReadParameters, _: RowPlaces) -> Query:
    given.expect("seqs", "columns")
    bound: dict[str, object] = {}
    condition = _numbered(given, bound)
    columns = ", ".join(given.columns(TOKENS))
    return Query(f"SELECT {columns} FROM stored.spans WHERE is_call AND {condition}", bound)


def _texts_of_spans(given: ReadParameters, places: RowPlaces) -> Query:
    given.expect("seqs", "trace_ids", "columns")
    bound: dict[str, object] = {}
    if "trace_ids" in given:
        replace(given, read="texts with trace_ids").expect("trace_ids", "columns")
        bound["trace_ids"] = trace_ids = given.texts("trace_ids")
        condition = f"{places.of_traces(trace_ids)} AND trace_id IN (SELECT unnest($trace_ids::VARCHAR[]))"
    else:
        condition = _numbered(given, bound)
    columns = ", ".join(given.columns(TEXTS))
    return Query(f"SELECT {columns} FROM stored.live_spans WHERE {condition}", bound)


def _numbered(given: ReadParameters, bound: dict[str, object]) -> str:
    """The condition on the rows with the numbers `seqs`, which are added to `bound`."""
    seqs = given.values.get("seqs")
    if not isinstance(seqs, list) or not all(type(seq) is int for seq in seqs):
        raise UsageError(f"the read {given.read!r} needs the parameter seqs, a list of integers")
    if not seqs:
        return "false"
    # A string is bound five times as fast as a list.
    bound["seqs"] = ",".join(map(str, seqs))
    return f"seq BETWEEN {min(seqs)} AND {max(seqs)} AND seq IN (SELECT unnest(string_split($seqs, ',')::BIGINT[]))"


def _records(given: ReadParameters, places: RowPlaces) -> Query:
    given.expect("event_names", "trace_ids", "rollout_ids", "attribute", "trusted", "columns")
    given.require("event_names")
    bound: dict[str, object] = {"event_names": given.texts("event_names")}
    conditions = ["event_name IN (SELECT unnest($event_names::VARCHAR[]))"]
    if "trace_ids" in given:
        bound["trace_ids"] = trace_ids = given.texts("trace_ids")
        conditions += [places.of_traces(trace_ids), "trace_id IN (SELECT unnest($trace_ids::VARCHAR[]))"]
    if "rollout_ids" in given:
        bound["rollout_ids"] = given.texts("rollout_ids")
        conditions.append("rollout_id IN (SELECT unnest($rollout_ids::VARCHAR[]))")
    if "attribute" in given:
        conditions.append("contains(attributes, '\"' || $attribute || '\"')")
        bound["attribute"] = given.text("attribute")
    if given.flag("trusted"):
        conditions.append("NOT untrusted")
    columns = ", ".join(given.columns(READS["logs"]))
    return Query(f"SELECT {columns} FROM main.logs WHERE {' AND '.join(conditions)}", bound)


def _newest(given: ReadParameters, _: RowPlaces) -> Query:
    given.expect("rows", "columns")
    rows = given.integer_within("rows", 1000, 1, _MOST_NEWEST)
    wanted = given.columns(tuple(NEWEST))
    columns = ", ".join(f"{NEWEST[name].format(name) or name} AS {name}" for name in wanted)
    since = "(SELECT last_seq - $rows FROM stored.progress)"
    return Query(f"SELECT {columns} FROM stored.live_spans WHERE seq > {since} ORDER BY seq DESC", {"rows": rows})


def _activity(given: ReadParameters, _: RowPlaces) -> Query:
    given.expect("since_ns", "columns")
    given.require("since_ns")
    columns = ", ".join(given.columns(ACTIVITY))
    # Rows are stored about in the order of time, so the scan skips most of them.
    counted = (
        "SELECT count(*) FILTER (is_call) AS calls, count(*) FILTER (rollout_status IS NOT NULL) AS rollouts,"
        " coalesce(sum(coalesce(len(prompt_ids), 0) + coalesce(len(completion_ids), 0)), 0)::BIGINT AS tokens"
        " FROM stored.live_spans WHERE end_ns >= $since_ns"
    )
    return Query(f"SELECT {columns} FROM ({counted})", {"since_ns": given.integer("since_ns")})


def _conditions(given: ReadParameters, bound: dict[str, object]) -> list[str]:
    """The conditions on a row `r`; their values are added to `bound`."""
    conditions = ["true"]
    if "run_id" in given:
        conditions.append("r.run_id = $run_id")
        bound["run_id"] = given.text("run_id")
    if "round" in given:
        conditions.append("r.round = $round")
        bound["round"] = given.integer("round")
    for key in _OF_TASKS.keys() & given.values.keys():
        conditions.append(_OF_TASKS[key])
        bound[key] = given.text(key)
    if given.flag("trusted"):
        conditions.append("NOT r.untrusted")
    if "attempt" in given:
        conditions.append("coalesce(r.attempt, 0) = $attempt")
        bound["attempt"] = given.integer("attempt")
    if "rollout_ids" in given:
        conditions.append("r.rollout_id IN (SELECT unnest($rollout_ids::VARCHAR[]))")
        bound["rollout_ids"] = given.texts("rollout_ids")
    conditions += [
        f"r.{column} IS NULL"
        for key, column in (("without_rollout", "rollout_id"), *_WITHOUT.items())
        if given.flag(key)
    ]
    if "since_seq" in given:
        conditions.append(
            "(r.trace_id IN (SELECT trace_id FROM touched WHERE trace_id IS NOT NULL)"
            " OR r.rollout_id IN (SELECT rollout_id FROM touched WHERE rollout_id IS NOT NULL))"
        )
        bound["since_seq"] = given.integer("since_seq")
    return conditions


def _near(
    tables: list[str], given: ReadParameters, bound: dict[str, object], places: RowPlaces
) -> tuple[list[str], str]:
    """The tables, limited to what is near the most selective parameter, and a condition on `seq` that holds for all their rows."""
    selective = {parameter for parameter in bound if (parameter, bound[parameter]) != _ALL}
    if given.read in _OF_SPANS and given.flag("without_rollout"):
        selective.add("round_without_rollout" if "round" in bound else "without_rollout")
    seed = next((parameter for parameter in SEEDS if parameter in selective), None)
    if seed is None:
        return tables, EVERYWHERE
    within = _within(seed, given, bound, places)
    return nearby(tables, seed, within), within if seed in NAMING else EVERYWHERE


def _within(seed: str, given: ReadParameters, bound: dict[str, object], places: RowPlaces) -> str:
    """Where the rows are that a read from these seeds needs; the rollouts of a task are added to `bound`."""
    if seed == "rollout_ids":
        return places.of_rollouts(given.texts("rollout_ids"))
    if seed in _OF_TASKS:
        bound["task_rollouts"] = rollout_ids = places.rollouts_of(_TASK_SPANS[seed], {seed: bound[seed]})
        return places.of_rollouts(rollout_ids)
    return places.without_rollout() if seed.endswith("without_rollout") else EVERYWHERE


def _qualified(name: str, column: str) -> str:
    if column == "n_tokens":
        return "coalesce(len(s.prompt_ids), 0) + coalesce(len(s.completion_ids), 0) AS n_tokens"
    from_span = name in ("spans", "calls") and column not in IDENTITY
    return f"{'s' if from_span else 'i'}.{column}"
