"""Reads what branches measured about calls: the evaluations that `trainspan branch` stored, with their intervals.

Only records of a runner or of the user count: an agent that may reward itself still measures nothing.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import polars as pl

from trainspan_processing.read.policy_versions import PolicyVersions, policies_of
from trainspan_processing.read.source import TRACES_PER_READ, Selection, Source
from trainspan_processing.read.span_words import SpanKey
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_schemas.telemetry import keys

__all__ = ["Measured", "Measurement", "own_scores", "read_measurements"]

_COLUMNS: Final = ("time_ns", "trace_id", "span_id", "attributes", "untrusted")


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured number, in units of reward."""

    score: float
    interval: tuple[float, float] | None
    """95 %; None: too few rollouts, or equal rewards."""
    policies: tuple[str, ...] = ()
    """Name and version of every policy that sampled the branches of this number."""
    reward: tuple[str, ...] = ()
    """What made the rewards that `score` is of (`reward_definition`)."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run of branches measured about one call."""

    run_id: str | None
    """The run of the branches; None if the sender did not state it."""
    time_ns: int
    value: Measured | None
    """Of the state before the call."""
    is_start: bool
    """Whether that value is the mean reward of the rollout's group and not of branches."""
    advantage: Measured | None
    rollouts: int | None
    """Rewarded rollouts that the value is the mean of."""
    diverged: int | None
    """Branches that did not reach the state before the call."""
    policies: tuple[str, ...]
    """Name and version of every policy that sampled the branches."""

    @property
    def source(self) -> str:
        """What the value is the mean of, in words."""
        if self.value is None or self.rollouts is None:
            return "–"
        return f"{self.rollouts} {'of its group' if self.is_start else 'branches' if self.rollouts > 1 else 'branch'}"


_Record = tuple[int, Mapping[str, Any]]
"""time_ns and attributes of one record."""


def read_measurements(source: Source, trace_ids: Collection[str]) -> dict[SpanKey, list[Measurement]]:
    """The measurements on the spans of these traces, one for each run of branches, the newest first."""
    by_span: dict[SpanKey, dict[str | None, dict[str, _Record]]] = {}
    for batch in _records(source, sorted(trace_ids)):
        for time_ns, trace_id, span_id, text, untrusted in batch.select(_COLUMNS).iter_rows():
            attributes = json.loads(text or "{}")
            name, run_id = attributes.get(keys.EVALUATION_NAME), attributes.get(keys.MEASURED_BY)
            if untrusted or span_id is None or name not in keys.MEASUREMENTS or not _is_number(_score(attributes)):
                continue
            runs = by_span.setdefault((trace_id, span_id), {})
            records = runs.setdefault(run_id if isinstance(run_id, str) else None, {})
            records[name] = max(records.get(name, (0, {})), (time_ns, attributes), key=lambda record: record[0])
    return {
        span: sorted((_measurement(*run) for run in runs.items()), key=lambda item: item.time_ns, reverse=True)
        for span, runs in by_span.items()
    }


def own_scores(
    source: Source, calls: pl.DataFrame, pick: Callable[[Measurement], Measured | None], reward: Sequence[str]
) -> tuple[pl.DataFrame, int]:
    """trace_id, span_id and `score` of each of CALLS: its newest measurement by the policy versions of its own rollout, with
    the same `reward` (a `reward_definition`).

    The values and rewards of a rollout are those of the policy that sampled it and of the settings now, so that values of
    another version or reward cannot be compared with them. Also returns how many calls have only such measurements, or some
    that do not say what they are of.
    """
    measured = read_measurements(source, calls["trace_id"].unique().to_list())
    policies, versions, rows, ignored = policies_of(calls, ROLLOUT_KEY), PolicyVersions(source), [], 0
    for rollout_id, attempt, run_id, round_, *span in calls.select(
        *ROLLOUT_KEY, "run_id", "round", *SPAN_KEY
    ).iter_rows():
        scored = [each for each in map(pick, measured.get((span[0], span[1]), ())) if each is not None]
        used = policies.get((rollout_id, attempt), ())
        fitting = [
            (*span, each.score)
            for each in scored
            if each.policies
            and each.reward == tuple(reward)
            and not versions.differ(each.policies, used, run_id, round_)
        ]
        rows += fitting[:1]
        ignored += bool(scored and not fitting)
    schema = {**dict.fromkeys(SPAN_KEY, pl.String), "score": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row"), ignored


def _records(source: Source, traces: Sequence[str]) -> Iterator[pl.DataFrame]:
    for start in range(0, len(traces), TRACES_PER_READ):
        some, events = list(traces[start : start + TRACES_PER_READ]), [keys.EVALUATION_EVENT]
        yield from source.read("records", Selection(), _COLUMNS, event_names=events, trace_ids=some)


def _measurement(run_id: str | None, records: Mapping[str, _Record]) -> Measurement:
    """One run's measurement from its newest record of each name."""
    by_branches, start, advantage = (records.get(name) for name in keys.MEASUREMENTS)
    value = by_branches or start
    _, facts = value or advantage or (0, {})
    return Measurement(
        run_id=run_id,
        time_ns=max(time_ns for time_ns, _ in records.values()),
        value=_measured(value),
        is_start=by_branches is None and start is not None,
        advantage=_measured(advantage),
        rollouts=_count(facts.get(keys.MEASURED_ROLLOUTS)),
        diverged=_count(facts.get(keys.MEASURED_DIVERGED)),
        policies=_texts(advantage or value or (0, {}), keys.MEASURED_POLICIES),
    )


def _measured(record: _Record | None) -> Measured | None:
    if record is None:
        return None
    ends = [record[1].get(name) for name in (keys.INTERVAL_LOW, keys.INTERVAL_HIGH)]
    low, high = (float(end) if _is_number(end) else None for end in ends)
    interval = None if low is None or high is None else (low, high)
    policies, reward = _texts(record, keys.MEASURED_POLICIES), _texts(record, keys.MEASURED_REWARD)
    return Measured(float(_score(record[1])), interval, policies, reward)


def _texts(record: _Record, key: str) -> tuple[str, ...]:
    values = record[1].get(key)
    return tuple(name for name in values if isinstance(name, str)) if isinstance(values, list) else ()


def _score(attributes: Mapping[str, Any]) -> Any:
    return attributes.get(keys.EVALUATION_SCORE)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
