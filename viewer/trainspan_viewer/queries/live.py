"""What happens now: rollouts as they run, the newest calls, and what fails. Only the newest rows of the store are listed."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainspan_schemas.telemetry import keys
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.runs import RunSummary, summary_of
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import Row, StoreReader

__all__ = ["WINDOW", "LiveModel", "RunningRollout", "load_live"]

WINDOW: Final = 2000
"""Rows of each store that are listed from."""
_SHOWN: Final = 30
_MINUTE_NS: Final = 60 * 10**9
_COLUMNS: Final = (
    *("seq", "trace_id", "rollout_id", "attempt", "task_id", "round", "split", "agent", "is_call", "call_index"),
    *("policy_name", "policy_version", "finish_reason", "delivered", "start_ns", "end_ns", "n_tokens", "call_facts"),
    *("rollout_status", "status_code", "name", "service_name", "status_message"),
)
_ROLLOUTS: Final = ("rollout_id", "attempt", "status", "reward", "n_calls", "task_id", "round", "split", "end_ns")
_ACTIVITY: Final = ("calls", "tokens", "rollouts")
_ERROR: Final = 2
_SHARED_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class RunningRollout:
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
    running: Sequence[RunningRollout]
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
    """Whether the store has acknowledged spans that these numbers lack."""
    params: Params


def load_live(sources: Sources, params: Params) -> LiveModel:
    """Raises StoreError."""
    now = time.time_ns()
    newest = _newest(sources.store)
    calls = [row for row in newest.spans if row["is_call"]]
    requests = Counter((*_attempt(row), row["call_index"]) for row in calls)
    # A page counts the choices of a request (n above 1) as calls of their own: the request's index is then not the call's.
    several = {(rollout, attempt) for (rollout, attempt, _), choices in requests.items() if choices > 1}
    runs = sources.paths.all_runs()[:1]
    run = summary_of(runs[0]) if runs else None
    return LiveModel(
        run=run if run is not None and run.status == "running" else None,
        running=_running(calls, newest.ended)[:_SHOWN],
        finished=newest.finished,
        calls=[
            {
                **row,
                "is_internal": _is_internal(row["call_facts"]),
                "has_own_index": row["call_index"] is not None and _attempt(row) not in several,
            }
            for row in calls[:_SHOWN]
        ],
        failures=[row for row in newest.ended if row["status"] != "ok"][:_SHOWN],
        errors=[row for row in newest.spans if row["status_code"] == _ERROR][:_SHOWN],
        calls_per_minute=newest.minute["calls"],
        tokens_per_minute=newest.minute["tokens"],
        rollouts_per_minute=newest.minute["rollouts"],
        now_ns=now,
        is_behind=newest.is_behind,
        params=params,
    )


def _attempt(row: Row) -> tuple[str | None, int]:
    return row["rollout_id"], row["attempt"] or 0


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest rows of a store."""

    spans: Sequence[Row]
    """Newest first."""
    ended: Sequence[Row]
    """Rollouts whose span is among them, the last to end first; fields are those of the span."""
    finished: Sequence[Row]
    """The first of them with their rewards, as the store has them."""
    minute: Row
    """Calls, their tokens, and rollouts that ended in the last minute; of all rows."""
    is_behind: bool
    until_s: float
    """How long it may be shown, on the monotonic clock."""


_kept: dict[tuple[str, ...], _Newest] = {}


def _newest(store: StoreReader) -> _Newest:
    """The newest rows; concurrent requests share one read."""
    newest = _kept.get(store.stores)
    if newest is not None and time.monotonic() < newest.until_s and not newest.is_behind:
        return newest
    read = store.read("newest", _COLUMNS, most=WINDOW * len(store.stores), rows=WINDOW)
    rows = read.records()
    if len(store.stores) > 1:
        rows.sort(key=lambda row: -int(row["end_ns"] or row["start_ns"]))
    rollouts: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        if row["rollout_id"] is not None:
            rollouts.setdefault(row["trace_id"], {})[row["rollout_id"], row["attempt"]] = row
    for row in rows:
        attempts = rollouts.get(row["trace_id"], {})
        if row["rollout_id"] is None and len(attempts) == 1:
            (known,) = attempts.values()
            row |= {name: known[name] for name in ("rollout_id", "attempt", "task_id", "round", "split")}
    ended = [{**row, "status": row["rollout_status"], "n_calls": None} for row in rows if row["rollout_status"]]
    ended.sort(key=lambda row: -int(row["end_ns"] or 0))
    ids = list(dict.fromkeys(row["rollout_id"] for row in ended if row["rollout_id"]))[:_SHOWN]
    stored = store.read("rollouts", _ROLLOUTS, rollout_ids=ids).records() if ids else []
    stored.sort(key=lambda row: -int(row["end_ns"] or 0))
    numbers = {(row["rollout_id"], row["attempt"] or 0): row["n_calls"] for row in stored}
    for row in ended:
        row["n_calls"] = numbers.get((row["rollout_id"], row["attempt"] or 0))
    activity = store.read("activity", _ACTIVITY, since_ns=time.time_ns() - _MINUTE_NS)
    fresh = _Newest(
        spans=rows,
        ended=ended,
        finished=stored[:_SHOWN],
        minute={name: sum(record[name] for record in activity.records()) for name in _ACTIVITY},
        is_behind=read.is_behind or activity.is_behind,
        until_s=time.monotonic() + _SHARED_S,
    )
    _kept.clear()
    _kept[store.stores] = fresh
    return fresh


def _is_internal(facts: str | None) -> bool:
    """Whether the server sent this request to itself, for example the canary of a swap."""
    return bool(json.loads(facts or "{}").get(keys.CALL_INTERNAL))


def _running(calls: Sequence[Row], rollouts: Sequence[Row]) -> list[RunningRollout]:
    """Rollouts with calls that have not ended, the last active one first."""
    ended = {(row["rollout_id"], row["attempt"] or 0) for row in rollouts}
    by_rollout: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in calls:
        key = (row["rollout_id"], row["attempt"] or 0)
        if row["rollout_id"] is not None and key not in ended:
            by_rollout[key].append(row)
    progress = [
        RunningRollout(
            rollout_id=rollout,
            attempt=attempt,
            task_id=rows[0]["task_id"],
            calls=len(rows),
            tokens=sum(row["n_tokens"] or 0 for row in rows),
            began_ns=min(row["start_ns"] for row in rows),
            last_ns=max(row["end_ns"] or row["start_ns"] for row in rows),
        )
        for (rollout, attempt), rows in by_rollout.items()
    ]
    return sorted(progress, key=lambda running: -running.last_ns)
