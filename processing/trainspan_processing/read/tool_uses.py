"""What came of the tool calls of answers: from the spans and log records of frameworks and harnesses, and from later requests.

All name a tool call by the id that the policy server gave it in the answer, so that it is known which call of the model a tool's
outcome belongs to, whatever the clocks say. If a rollout has tool spans without ids, a request's results only add to those of the
same name, in order: they are the same steps.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY, Schema
from trainspan_processing.text.tool_steps import TOOL_EVENTS, ToolStep, tool_step, tool_step_of_record
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
call_span_id are the model's call that asked for it, NULL if no record has its id; trace_id and span_id its own span, NULL if it has
none. `start_ns` and `end_ns` are NULL if only a request tells of it. `failed` is false unless a record says otherwise."""

_RECORD: Final = ("time_ns", "trace_id", "rollout_id", "attributes")
_IDS_PER_READ: Final = 10_000
_Rollout = tuple[str, int]
_Key = tuple[str, str]


@dataclass(slots=True)
class _Use:
    """One tool call, as far as records of it were read."""

    call_id: str | None = None
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

    def add(self, step: ToolStep) -> None:
        """Fills in what is not known yet."""
        for name in ("name", "arguments", "result", "failed", "error"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(step, name))


@dataclass(slots=True)
class _OfRollout:
    """The tool calls of a rollout."""

    by_id: dict[str, _Use] = field(default_factory=dict)
    nameless: list[_Use] = field(default_factory=list)
    """Those without an id."""

    def use(self, call_id: str | None, order: int) -> _Use:
        if call_id is None:
            self.nameless.append(_Use(order=order))
            return self.nameless[-1]
        use = self.by_id.setdefault(call_id, _Use(call_id, order=order))
        use.order = min(use.order, order)
        return use

    def result(self, result: ToolResult, order: int) -> None:
        """Adds what a request says."""
        step = ToolStep(result.id, result.name, result.arguments, result.result, result.is_error, None, None)
        if result.id not in self.by_id and self.nameless:
            same = (use for use in self.nameless if use.name == result.name and use.order <= order and not use.call_id)
            if (use := next(same, None)) is None:
                return
            use.call_id, self.by_id[result.id] = result.id, use
        self.use(result.id, order).add(step)


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
    found: dict[_Rollout, _OfRollout] = {}
    for row in tools.select(*ROLLOUT_KEY, *SPAN_KEY, "start_ns", "end_ns", "failed", "error_type").iter_rows():
        rollout, span, (start_ns, end_ns, failed, error) = (row[0], row[1] or 0), (row[2], row[3]), row[4:]
        if (step := tool_step(attributes.get(span, {}))) is not None:
            use = found.setdefault(rollout, _OfRollout()).use(step.call_id, start_ns)
            use.span, use.start_ns, use.end_ns = span, start_ns, end_ns
            use.failed, use.error = failed or step.failed, error if failed else None
            use.add(step)
    asked: dict[_Rollout, dict[str, _Key]] = {}
    by_trace: dict[str, set[_Rollout]] = {}
    results: list[tuple[_Rollout, int, ToolResult]] = []
    for row in speaking.select(*ROLLOUT_KEY, *SPAN_KEY, "start_ns").iter_rows():
        rollout, span = (row[0], row[1]), (row[2], row[3])
        by_trace.setdefault(row[2], set()).add(rollout)
        said = attributes.get(span, {})
        ids = said.get(keys.CALL_TOOL_CALLS)
        asked.setdefault(rollout, {}).update(dict.fromkeys(ids if isinstance(ids, list) else (), span))
        results += [(rollout, row[4], result) for result in _results(said)]
    by_id: dict[str, set[_Rollout]] = {}
    for rollout in asked:
        by_id.setdefault(rollout[0], set()).add(rollout)
    for time_ns, trace_id, rollout_id, step in _records(source, sorted(by_trace), sorted(by_id)):
        for rollout in by_trace.get(trace_id or "", by_id.get(rollout_id or "", ())):
            if step.call_id in asked[rollout]:
                start_ns = time_ns - round((step.seconds or 0.0) * 1e9)
                use = found.setdefault(rollout, _OfRollout()).use(step.call_id, start_ns)
                use.start_ns, use.end_ns = use.start_ns or start_ns, use.end_ns or time_ns
                use.add(step)
    for rollout, start_ns, result in sorted(results, key=lambda item: item[1]):
        found.setdefault(rollout, _OfRollout()).result(result, start_ns)
    return _frame(found, asked)


def _frame(found: dict[_Rollout, _OfRollout], asked: dict[_Rollout, dict[str, _Key]]) -> pl.DataFrame:
    rows: list[tuple[Any, ...]] = []
    for rollout, of_rollout in found.items():
        uses = {id(use): use for use in (*of_rollout.nameless, *of_rollout.by_id.values())}
        for use in sorted(uses.values(), key=lambda use: use.order):
            call = asked.get(rollout, {}).get(use.call_id or "") or (None, None)
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


def _results(attributes: Mapping[str, Any]) -> list[ToolResult]:
    """What a request said; the policy server wrote it, but an agent may send a span of that form."""
    text = attributes.get(keys.CALL_TOOL_RESULTS)
    try:
        return results_from_json(text) if isinstance(text, str) else []
    except InvalidRecordError:
        return []


def _records(
    source: Source, traces: list[str], rollouts: list[str]
) -> Iterator[tuple[int, str | None, str | None, ToolStep]]:
    """time_ns, trace, rollout and content of the log records of tools in these traces or with these rollouts, by time."""
    rows: set[tuple[int, str | None, str | None, str | None]] = set()
    for name, ids in (("trace_ids", traces), ("rollout_ids", rollouts)):
        for start in range(0, len(ids), _IDS_PER_READ):
            asked: dict[str, Any] = {name: ids[start : start + _IDS_PER_READ]}
            for batch in source.read("records", Selection(), _RECORD, event_names=TOOL_EVENTS, **asked):
                rows.update(batch.select(_RECORD).iter_rows())
    for time_ns, trace_id, rollout_id, text in sorted(rows, key=lambda row: (row[0], str(row))):
        step = tool_step_of_record(json.loads(text or "{}"))
        if step.call_id is not None:
            yield time_ns, trace_id, rollout_id, step
