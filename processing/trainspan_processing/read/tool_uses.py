"""What came of the tool calls of answers: from the spans and log records of frameworks and harnesses, and from later requests.

All name a tool call by the id that the policy server gave it in the answer, so that it is known which call of the model a tool's
outcome belongs to, whatever the clocks say. Some parsers of vLLM number the calls of a request's history (`functions.bash:0`), so that
an id comes again after a compaction, or in a sub-agent: an outcome then belongs to the last call before it that asked for the id, and
to none if an earlier one's outcome was not brought when that call asked, as of concurrent sub-agents. If a rollout has tool spans
without ids, records and results add to those of the same name, in order: they are the same steps.
"""

import bisect
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY, Schema
from trainspan_processing.text.tool_steps import TOOL_EVENTS, ToolStep, tool_step
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tools import ToolResult, results_from_json

__all__ = ["TOOL_USES", "read_tool_uses"]

TOOL_USES: Final[Schema] = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "tool_call_id": pl.String,
    "call_trace_id": pl.String,
    "call_span_id": pl.String,
    "trace_id": pl.String,
    "span_id": pl.String,
    "name": pl.String,
    "arguments": pl.String,
    "result": pl.String,
    "failed": pl.Boolean,
    "error": pl.String,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "seen_ns": pl.Int64,
}
"""One row per tool call, within a rollout in the order of `seen_ns`, when the first record of it was made. call_trace_id and
call_span_id are the model's call that asked for it, NULL if no record has its id or if several calls may have asked; trace_id and span_id
its own span, NULL if it has none. `start_ns` and `end_ns` are NULL if only a request tells of it. `failed` is false unless a record
says otherwise."""

_RECORD: Final = ("time_ns", "trace_id", "rollout_id", "attributes")
_IDS_PER_READ: Final = 10_000
_SPEAKING: Final = (*ROLLOUT_KEY, *SPAN_KEY, "start_ns", "agent", "delivered")
_SPOKEN: Final = ("start_ns", *SPAN_KEY)
_GUESSABLE: Final = re.compile(r".{0,11}|.*:\d+", re.DOTALL)
"""Ids that a stranger may guess: a record of another trace must have a longer one, without a number of its own."""
_Rollout = tuple[str, int]
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Asker:
    """A call whose answer has a tool call's id."""

    start_ns: int
    span: _Key
    agent: str | None
    is_delivered: bool
    """False: no client had its answer."""


_Askers = Mapping[str, Sequence[_Asker]]
"""Id of a tool call → the calls of a rollout that asked for it, in the order of their starts."""


@dataclass(slots=True)
class _Use:
    """One tool call, as far as records of it were read."""

    call_id: str | None = None
    asker: int | None = 0
    """Place in `_Askers`; None: several calls may have asked."""
    span: _Key | None = None
    name: str | None = None
    arguments: str | None = None
    result: str | None = None
    failed: bool | None = None
    error: str | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    order: int = 0
    """When the first record of it was made, in ns."""
    is_brought: bool = False
    """Whether a request of the agent that asked has brought its result."""

    def add(self, step: ToolStep) -> None:
        """Fills in what is not known yet; a failure in any record counts."""
        for name in ("name", "arguments", "result", "error"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(step, name))
        if step.failed is not None:
            self.failed = bool(self.failed or step.failed)

    def may_be(self, step: ToolStep) -> bool:
        """Whether arguments and result do not contradict."""
        pairs = ((self.arguments, step.arguments), (self.result, step.result))
        return all(None in pair or pair[0] == pair[1] for pair in pairs)


@dataclass(slots=True)
class _OfRollout:
    """The tool calls of a rollout."""

    askers: _Askers
    brought: Mapping[tuple[str, str | None], Sequence[int]]
    """Id and agent → starts of the agent's requests that bring the result."""
    by_id: dict[tuple[str, int], _Use] = field(default_factory=dict)
    """Id and asker → the call."""
    unclear: dict[str, list[_Use]] = field(default_factory=dict)
    """Id → the calls that several may have asked for."""
    nameless: list[_Use] = field(default_factory=list)
    """Those whose spans have no id."""
    closings: dict[str, list[float]] = field(default_factory=dict)
    """Id → when a request of the agent brought the result that each asker asked for; −inf if nobody had the answer."""

    def of_span(self, step: ToolStep, start_ns: int) -> _Use:
        if step.call_id is None:
            self.nameless.append(_Use(order=start_ns))
            return self.nameless[-1]
        fits = self._fitting(step.call_id, start_ns, None)
        return self._with_id(step, step.call_id, fits) or self._new(_Use(order=start_ns), step.call_id, fits)

    def of_record(self, call_id: str, step: ToolStep, start_ns: int) -> _Use:
        fits = self._fitting(call_id, start_ns, None)
        use = self._with_id(step, call_id, fits)
        if use is None:
            use = self._new(self._nameless(step) or _Use(order=start_ns), call_id, fits)
        use.order = min(use.order, start_ns)
        return use

    def is_asker(self, call_id: str, agent: str | None) -> bool:
        return any(asker.agent == agent for asker in self.askers.get(call_id, ()))

    def add_result(self, result: ToolResult, order: int, agent: str | None) -> None:
        """Adds what a request of this agent says; those of the agent that asked come first, so that they count before others'."""
        step = ToolStep(result.id, result.name, result.arguments, result.result, result.is_error, None, None)
        fits, is_own = self._fitting(result.id, order - 1, agent), self.is_asker(result.id, agent)
        use = self._with_id(step, result.id, fits)
        if use is None:
            nameless = self._nameless(step, order)
            if self.nameless and nameless is None:
                return
            use = self._new(nameless or _Use(order=order), result.id, fits)
        elif use.is_brought and not is_own:
            return
        use.is_brought = use.is_brought or is_own
        use.order = min(use.order, order)
        use.name = step.name or use.name  # as the model called it; a harness may leave out the tool's server
        use.add(step)

    def caller(self, use: _Use) -> _Key | None:
        """The call that asked for it; None if none is known, or if choices of one request did."""
        askers = self.askers.get(use.call_id or "", ())
        if not askers or use.asker is None:
            return None
        start_ns = askers[use.asker].start_ns
        same = [asker.span for asker in askers if asker.start_ns == start_ns]
        return same[0] if len(same) == 1 else None

    def _fitting(self, call_id: str, at_ns: int, agent: str | None) -> list[int]:
        """The last call that had asked by then, of the agent if it asked at all, and earlier ones whose results had not been brought when
        it asked."""
        askers = self.askers.get(call_id, ())
        places = [place for place, asker in enumerate(askers) if asker.agent == agent] or range(len(askers))
        begun = [place for place in places if askers[place].start_ns <= at_ns]
        if not begun:
            return [min(places, default=0)]
        last_ns, closings = askers[begun[-1]].start_ns, self._closings(call_id)
        return [place for place in begun[:-1] if closings[place] > last_ns] + begun[-1:]

    def _closings(self, call_id: str) -> list[float]:
        if call_id not in self.closings:
            self.closings[call_id] = [self._closing(call_id, asker) for asker in self.askers.get(call_id, ())]
        return self.closings[call_id]

    def _closing(self, call_id: str, asker: _Asker) -> float:
        if not asker.is_delivered:
            return -math.inf
        starts = self.brought.get((call_id, asker.agent), ())
        place = bisect.bisect_right(starts, asker.start_ns)
        return starts[place] if place < len(starts) else math.inf

    def _with_id(self, step: ToolStep, call_id: str, fits: Sequence[int]) -> _Use | None:
        """The call with this id that the step belongs to; if several may have asked, one with the same arguments."""
        if len(fits) == 1:
            return self.by_id.get((call_id, fits[0]))
        clear = [use for place in fits if (use := self.by_id.get((call_id, place))) is not None and use.arguments]
        same = (use for use in clear if use.arguments == step.arguments and use.may_be(step))
        return next(same, None) or next((use for use in self.unclear.get(call_id, ()) if use.may_be(step)), None)

    def _new(self, use: _Use, call_id: str, fits: Sequence[int]) -> _Use:
        """Gives a call its id."""
        use.call_id, use.asker = call_id, fits[0] if len(fits) == 1 else None
        if use.asker is None:
            self.unclear.setdefault(call_id, []).append(use)
        else:
            self.by_id[call_id, use.asker] = use
        return use

    def _nameless(self, step: ToolStep, until_ns: int | None = None) -> _Use | None:
        """The first call without an id that may be the one of a step."""
        return next(
            (
                use
                for use in self.nameless
                if use.call_id is None
                and use.name == step.name
                and (until_ns is None or use.order <= until_ns)
                and (until_ns is not None or None in (use.arguments, step.arguments) or use.arguments == step.arguments)
            ),
            None,
        )


def read_tool_uses(
    source: Source,
    calls: pl.DataFrame,
    spans: pl.DataFrame,
    attributes: Mapping[_Key, Mapping[str, Any]] | None = None,
) -> pl.DataFrame:
    """TOOL_USES of the rollouts of `calls` (CALLS); `spans` (SPANS) may be of others too.

    `attributes` are those of these spans, if they have been read.
    """
    tools = spans.filter("is_tool").join(calls, on=ROLLOUT_KEY, how="semi").sort("start_ns", *SPAN_KEY)
    speaking = calls.filter("has_tools")
    if tools.is_empty() and speaking.is_empty():
        return pl.DataFrame(schema=TOOL_USES)
    if attributes is None:
        attributes = _attributes(source, pl.concat([_places(speaking), _places(tools)]))
    asked, results = _askers(speaking, attributes), _brought(speaking, attributes)
    uses: dict[_Rollout, _OfRollout] = {}
    for rollout_id, attempt in calls.select(ROLLOUT_KEY).unique(maintain_order=True).iter_rows():
        rollout = (rollout_id, attempt)
        brought: dict[tuple[str, str | None], list[int]] = {}
        for start_ns, agent, result in results.get(rollout, ()):
            brought.setdefault((result.id, agent), []).append(start_ns)
        uses[rollout] = _OfRollout(asked.get(rollout, {}), brought)
    _add_spans(uses, tools, attributes)
    _add_records(uses, speaking, source)
    for rollout, of_rollout in results.items():
        for start_ns, agent, result in sorted(
            of_rollout, key=lambda row: not uses[rollout].is_asker(row[2].id, row[1])
        ):
            uses[rollout].add_result(result, start_ns, agent)
    return _frame(uses)


def _askers(
    speaking: pl.DataFrame, attributes: Mapping[_Key, Mapping[str, Any]]
) -> dict[_Rollout, dict[str, list[_Asker]]]:
    asked: dict[_Rollout, dict[str, list[_Asker]]] = {}
    for *rollout, trace_id, span_id, start_ns, agent, delivered in (
        speaking.select(*_SPEAKING).sort(*_SPOKEN).iter_rows()
    ):
        of_rollout = asked.setdefault((rollout[0], rollout[1]), {})
        for call_id in _ids(attributes.get((trace_id, span_id), {})):
            of_rollout.setdefault(call_id, []).append(
                _Asker(start_ns, (trace_id, span_id), agent, delivered is not False)
            )
    return asked


def _brought(
    speaking: pl.DataFrame, attributes: Mapping[_Key, Mapping[str, Any]]
) -> dict[_Rollout, list[tuple[int, str | None, ToolResult]]]:
    """Start and agent of the request, and result, in the order of the requests."""
    results: dict[_Rollout, list[tuple[int, str | None, ToolResult]]] = {}
    for *rollout, trace_id, span_id, start_ns, agent, _ in speaking.select(*_SPEAKING).sort(*_SPOKEN).iter_rows():
        rows = [(start_ns, agent, result) for result in _results(attributes.get((trace_id, span_id), {}))]
        results.setdefault((rollout[0], rollout[1]), []).extend(rows)
    return results


def _add_spans(
    uses: Mapping[_Rollout, _OfRollout], tools: pl.DataFrame, attributes: Mapping[_Key, Mapping[str, Any]]
) -> None:
    for row in tools.select(*ROLLOUT_KEY, *SPAN_KEY, "start_ns", "end_ns", "failed", "error_type").iter_rows():
        rollout, span, (start_ns, end_ns, failed, error) = (row[0], row[1]), (row[2], row[3]), row[4:]
        if span not in attributes:  # deleted since
            continue
        step = tool_step(attributes[span])
        use = uses[rollout].of_span(step, start_ns)
        if use.span is None:  # of several spans with an id, the one that began first is the outermost
            use.span, use.start_ns, use.end_ns = span, start_ns, end_ns
        elif end_ns is not None:
            use.end_ns = max(use.end_ns or end_ns, end_ns)
        use.failed = use.failed or failed or step.failed
        use.error = use.error or (error if failed else None)
        use.add(step)


def _add_records(uses: Mapping[_Rollout, _OfRollout], speaking: pl.DataFrame, source: Source) -> None:
    by_trace: dict[str, set[_Rollout]] = {}
    by_id: dict[str, set[_Rollout]] = {}
    for rollout_id, attempt, trace_id in speaking.select(*ROLLOUT_KEY, "trace_id").unique().iter_rows():
        by_trace.setdefault(trace_id, set()).add((rollout_id, attempt))
        by_id.setdefault(rollout_id, set()).add((rollout_id, attempt))
    for time_ns, trace_id, rollout_id, call_id, step in _records(source, sorted(by_trace), sorted(by_id)):
        is_own = (trace_id or "") in by_trace
        if not is_own and _GUESSABLE.fullmatch(call_id):
            continue
        for rollout in by_trace[trace_id or ""] if is_own else by_id.get(rollout_id or "", ()):
            if call_id in uses[rollout].askers:
                start_ns = time_ns - round((step.seconds or 0.0) * 1e9)
                use = uses[rollout].of_record(call_id, step, start_ns)
                use.start_ns, use.end_ns = use.start_ns or start_ns, use.end_ns or time_ns
                use.add(step)


def _frame(of_rollouts: Mapping[_Rollout, _OfRollout]) -> pl.DataFrame:
    rows: list[tuple[Any, ...]] = []
    for rollout, of_rollout in of_rollouts.items():
        uses = {
            id(use): use
            for use in (
                *of_rollout.nameless,
                *of_rollout.by_id.values(),
                *itertools.chain(*of_rollout.unclear.values()),
            )
        }
        for use in sorted(uses.values(), key=lambda use: use.order):
            call = of_rollout.caller(use) or (None, None)
            said = (
                use.name,
                use.arguments,
                use.result,
                bool(use.failed),
                use.error,
                use.start_ns,
                use.end_ns,
                use.order,
            )
            rows.append((*rollout, use.call_id, *call, *(use.span or (None, None)), *said))
    return pl.DataFrame(rows, schema=TOOL_USES, orient="row")


def _places(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.select("store", "seq", *SPAN_KEY).drop_nulls("seq")


def _attributes(source: Source, spans: pl.DataFrame) -> dict[_Key, dict[str, Any]]:
    return {
        (trace_id, span_id): json.loads(text or "{}")
        for batch in source.attributes(spans)
        for trace_id, span_id, text in batch.select(*SPAN_KEY, "attributes").iter_rows()
    }


def _ids(attributes: Mapping[str, Any]) -> list[str]:
    """Ids of the tool calls in an answer."""
    ids = attributes.get(keys.CALL_TOOL_CALLS)
    return list(dict.fromkeys(one for one in ids if isinstance(one, str))) if isinstance(ids, list) else []


def _results(attributes: Mapping[str, Any]) -> list[ToolResult]:
    """What a request said; the policy server wrote it, but an agent may send a span of that form."""
    text = attributes.get(keys.CALL_TOOL_RESULTS)
    try:
        return results_from_json(text) if isinstance(text, str) else []
    except InvalidRecordError:
        return []


def _records(
    source: Source, traces: list[str], rollouts: list[str]
) -> Iterator[tuple[int, str | None, str | None, str, ToolStep]]:
    """time_ns, trace, rollout, id of the tool call and content of the tools' log records in these traces or with these rollouts, by
    time."""
    rows: set[tuple[int, str | None, str | None, str | None]] = set()
    for name, ids in (("trace_ids", traces), ("rollout_ids", rollouts)):
        for start in range(0, len(ids), _IDS_PER_READ):
            asked: dict[str, Any] = {name: ids[start : start + _IDS_PER_READ]}
            for batch in source.read("records", Selection(), _RECORD, event_names=TOOL_EVENTS, **asked):
                rows.update(batch.select(_RECORD).iter_rows())
    for time_ns, trace_id, rollout_id, text in sorted(rows, key=lambda row: (row[0], str(row))):
        step = tool_step(json.loads(text or "{}"))
        if step.call_id is not None:
            yield time_ns, trace_id, rollout_id, step.call_id, step
