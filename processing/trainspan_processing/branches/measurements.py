"""Reads what branches measured about calls: the evaluations that `trainspan branch` stored, with their intervals.

Only records of a runner or of the user count: an agent that may reward itself still measures nothing.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.span_words import SpanKey
from trainspan_schemas.telemetry import keys

__all__ = ["Measured", "Measurement", "read_measurements"]

_COLUMNS: Final = ("time_ns", "trace_id", "span_id", "attributes", "untrusted")


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured number, in units of reward."""

    score: float
    interval: tuple[float, float] | None
    """95 %; None: too few rollouts."""


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


_Said = tuple[int, Mapping[str, Any]]
"""time_ns and attributes of one record."""


def read_measurements(source: Source, trace_ids: Collection[str]) -> dict[SpanKey, list[Measurement]]:
    """The measurements on the spans of these traces, one for each run of branches, the newest first."""
    found: dict[SpanKey, dict[str | None, dict[str, _Said]]] = {}
    events, traces = [keys.EVALUATION_EVENT], sorted(trace_ids)
    for batch in source.read("records", Selection(), _COLUMNS, event_names=events, trace_ids=traces):
        for time_ns, trace_id, span_id, text, untrusted in batch.select(_COLUMNS).iter_rows():
            attributes = json.loads(text or "{}")
            name, run_id = attributes.get(keys.EVALUATION_NAME), attributes.get(keys.MEASURED_BY)
            if untrusted or span_id is None or name not in keys.MEASUREMENTS or not _is_number(_score(attributes)):
                continue
            runs = found.setdefault((trace_id, span_id), {})
            said = runs.setdefault(run_id if isinstance(run_id, str) else None, {})
            said[name] = max(said.get(name, (0, {})), (time_ns, attributes), key=lambda one: one[0])
    return {
        span: sorted((_measurement(*run) for run in runs.items()), key=lambda one: one.time_ns, reverse=True)
        for span, runs in found.items()
    }


def _measurement(run_id: str | None, said: Mapping[str, _Said]) -> Measurement:
    """One run's measurement from its newest record of each name."""
    by_branches, start, advantage = (said.get(name) for name in keys.MEASUREMENTS)
    value = by_branches or start
    _, facts = value or advantage or (0, {})
    _, sampled = advantage or value or (0, {})
    policies = sampled.get(keys.MEASURED_POLICIES)
    return Measurement(
        run_id=run_id,
        time_ns=max(time_ns for time_ns, _ in said.values()),
        value=_measured(value),
        is_start=by_branches is None and start is not None,
        advantage=_measured(advantage),
        rollouts=_count(facts.get(keys.MEASURED_ROLLOUTS)),
        diverged=_count(facts.get(keys.MEASURED_DIVERGED)),
        policies=tuple(name for name in policies if isinstance(name, str)) if isinstance(policies, list) else (),
    )


def _measured(said: _Said | None) -> Measured | None:
    if said is None:
        return None
    ends = [said[1].get(name) for name in (keys.INTERVAL_LOW, keys.INTERVAL_HIGH)]
    low, high = (float(end) if _is_number(end) else None for end in ends)
    return Measured(float(_score(said[1])), None if low is None or high is None else (low, high))


def _score(attributes: Mapping[str, Any]) -> Any:
    return attributes.get(keys.EVALUATION_SCORE)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
