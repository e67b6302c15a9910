"""What happens now: rollouts as they run, the newest calls, and what fails. Only the newest rows of the store are examined."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainspan_schemas import keys
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.runs import RunSummary, summary_of
from trainspan_viewer.queries.sources import Sources

__all__ = ["LiveModel", "Progress", "load_live"]

_WINDOW: Final = 2000
"""Rows of the store that are examined."""
_SHOWN: Final = 30
_MINUTE_NS: Final = 60 * 10**9
_CALLS: Final = (
    *("seq", "rollout_id", "attempt", "task_id", "run_id", "round", "split", "agent", "call_index", "policy_version"),
    *("finish_reason", "delivered", "start_ns", "end_ns", "n_tokens", "call_facts"),
)
_ROLLOUTS: Final = (
    "rollout_id",
    "attempt",
    "task_id",
    "run_id",
    "round",
    "split",
    "status",
    "reward",
    "n_calls",
    "end_ns",
)
_ERROR: Final = 2

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """A rollout with calls, but without an end yet."""

    rollout_id: str
    attempt: int
    task_id: str | None
    calls: int
    tokens: int
    began_ns: int
    last_ns: int


@dataclass(frozen=True, slots=True)
class LiveModel:
    """The page of what happens now."""

    run: RunSummary | None
    """The newest run, if it is in progress."""
    running: Sequence[Progress]
    finished: Sequence[Row]
    """The newest rollouts that ended."""
    calls: Sequence[Row]
    failures: Sequence[Row]
    """Rollouts that failed, newest first."""
    errors: Sequence[Row]
    """Spans with an error status, newest first."""
    calls_per_minute: int
    tokens_per_minute: int
    rollouts_per_minute: int
    now_ns: int
    is_behind: bool
    params: Params


def load_live(sources: Sources, params: Params) -> LiveModel:
    """Raises StoreError."""
    store, now = sources.store, time.time_ns()
    since = max(0, store.last_seq() - _WINDOW)
    calls = store.read("calls", _CALLS, since_seq=since)
    rows = [{**row, "is_internal": _is_internal(row["call_facts"])} for row in calls.records()]
    rows.sort(key=lambda row: -int(row["seq"]))
    rollouts = store.read("rollouts", _ROLLOUTS, since_seq=since).records()
    rollouts.sort(key=lambda row: -int(row["end_ns"] or 0))
    sql = (
        "SELECT seq, trace_id, left(name, 300) AS name, left(service_name, 300) AS service_name, "
        "left(status_message, 300) AS status_message, end_ns FROM spans "
        f"WHERE seq > {since} AND status_code = {_ERROR} ORDER BY seq DESC LIMIT {_SHOWN}"
    )
    errors = store.select(sql, most=_SHOWN).records()
    recent = [row for row in rows if now - int(row["end_ns"] or 0) < _MINUTE_NS]
    newest = sources.places.all_runs()[:1]
    run = summary_of(newest[0]) if newest else None
    return LiveModel(
        run=run if run is not None and run.status == "running" else None,
        running=_running(rows, rollouts)[:_SHOWN],
        finished=rollouts[:_SHOWN],
        calls=rows[:_SHOWN],
        failures=[row for row in rollouts if row["status"] != "ok"][:_SHOWN],
        errors=errors,
        calls_per_minute=len(recent),
        tokens_per_minute=sum(row["n_tokens"] or 0 for row in recent),
        rollouts_per_minute=sum(now - int(row["end_ns"] or 0) < _MINUTE_NS for row in rollouts),
        now_ns=now,
        is_behind=calls.is_behind,
        params=params,
    )


def _is_internal(facts: str | None) -> bool:
    """Whether the server asked itself, as for the canary of a swap."""
    return bool(json.loads(facts or "{}").get(keys.CALL_INTERNAL))


def _running(calls: Sequence[Row], rollouts: Sequence[Row]) -> list[Progress]:
    """Rollouts with calls that have not ended, the last active one first."""
    ended = {(row["rollout_id"], row["attempt"]) for row in rollouts}
    found: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in calls:
        key = (row["rollout_id"], row["attempt"] or 0)
        if row["rollout_id"] is not None and key not in ended:
            found[key].append(row)
    progress = [
        Progress(
            rollout_id=rollout,
            attempt=attempt,
            task_id=rows[0]["task_id"],
            calls=len(rows),
            tokens=sum(row["n_tokens"] or 0 for row in rows),
            began_ns=min(row["start_ns"] for row in rows),
            last_ns=max(row["end_ns"] or row["start_ns"] for row in rows),
        )
        for (rollout, attempt), rows in found.items()
    ]
    return sorted(progress, key=lambda one: -one.last_ns)
