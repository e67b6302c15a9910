"""Langfuse: observations, traces and scores, as its exports and the pages of its API have them.

Schema: https://api.reference.langfuse.com (traces with or without their observations and scores, observations, scores). Names
may be in camelCase or, as in exports to blob storage, in snake_case.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainspan_importers.account import Account
from trainspan_importers.reading import Converted, Format, Reader, each
from trainspan_importers.recorded import (
    call_attributes,
    messages_in,
    number_of,
    other_fields,
    outputs_in,
    text_of,
    tool_attributes,
    tools_in,
)
from trainspan_importers.traces import Trace, id_in, kept_fields, nanoseconds, origin_of
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = ["LANGFUSE"]

_NAME: Final = "langfuse"
_SNAKE: Final = re.compile(r"_([a-z])")
_LISTS: Final = ("data", "observations", "scores")
_TRACE_FIELDS: Final = (
    "id",
    "timestamp",
    "name",
    "sessionId",
    "userId",
    "metadata",
    "observations",
    "scores",
    "latency",
)
_OBSERVATION_FIELDS: Final = (
    *("id", "traceId", "parentObservationId", "name", "startTime", "endTime", "metadata", "statusMessage"),
    *("promptName", "promptVersion", "modelParameters", "sessionId", "userId"),
)
_SCORE_FIELDS: Final = (
    *("id", "traceId", "observationId", "name", "value", "stringValue", "comment", "timestamp", "dataType"),
)
_RENAMED: Final = {
    "usageDetails": "langfuse.observation.usage_details",
    "costDetails": "langfuse.observation.cost_details",
    "completionStartTime": "langfuse.observation.completion_start_time",
}


@dataclass(slots=True)
class _Bounds:
    """Of the observations of a trace that has no record of its own."""

    begin_ns: int
    end_ns: int
    more: JsonObject
    failed: str | None = None


class _LangfuseReader(Reader):
    def __init__(self, account: Account) -> None:
        self._account = account
        self._origin = origin_of(_NAME)
        self._traced: set[str] = set()
        self._bounds: dict[str, _Bounds] = {}
        """Of traces without a record so far."""

    def add(self, value: Any) -> Iterator[Converted]:
        if not isinstance(value, dict):
            raise InvalidRecordError("no object")
        record = {_camel(name): item for name, item in value.items()}
        lists = [record[name] for name in _LISTS if isinstance(record.get(name), list)]
        if _is_trace(record):
            yield from self._trace(record)
        elif _is_score(record):
            yield from self._score(record)
            return
        elif _is_observation(record):
            yield from self._observation(record)
            return
        elif not lists and not record.keys() <= {"meta"}:
            raise InvalidRecordError("neither a trace, nor an observation, nor a score")
        known = {"traceId": record["id"]} if "timestamp" in record else {}
        yield from each(
            ({**known, **item} for items in lists for item in items if isinstance(item, dict)),
            self.add,
        )

    def end(self) -> Iterator[Converted]:
        """The root spans of traces of which only observations were there."""
        for source_id, bounds in self._bounds.items():
            trace = Trace(_NAME, source_id, self._origin)
            yield trace.span(
                trace.root_id, None, "trace", bounds.begin_ns, bounds.end_ns, bounds.more, error=bounds.failed
            )

    def _trace(self, record: Mapping[str, Any]) -> Iterator[Converted]:
        trace = Trace(_NAME, id_in(record, "id"), self._origin)
        begin = nanoseconds(record["timestamp"], "timestamp")
        latency = number_of(record.get("latency")) or 0.0
        attributes = {
            "session.id": record.get("sessionId"),
            "user.id": record.get("userId"),
            "langfuse.trace.id": record["id"],
            **_metadata("langfuse.trace.metadata", record.get("metadata")),
            **kept_fields("langfuse.trace", record, _TRACE_FIELDS),
        }
        self._traced.add(trace.source_id)
        self._bounds.pop(trace.source_id, None)
        name = str(record.get("name") or "trace")
        yield trace.span(trace.root_id, None, name, begin, begin + round(latency * 1e9), attributes)

    def _observation(self, record: Mapping[str, Any]) -> Iterator[Converted]:
        trace = Trace(_NAME, id_in(record, "traceId"), self._origin)
        begin = nanoseconds(record["startTime"], "startTime")
        end = nanoseconds(record["endTime"], "endTime") if record.get("endTime") else begin
        failed = str(record.get("statusMessage") or "ERROR") if record.get("level") == "ERROR" else None
        parent = record.get("parentObservationId")
        span = trace.span(
            trace.span_id(id_in(record, "id")),
            trace.span_id(parent) if isinstance(parent, str) and parent else trace.root_id,
            str(record.get("name") or record["type"]),
            begin,
            end,
            _attributes(record),
            error=failed,
        )
        if trace.source_id not in self._traced:
            self._widen(trace.source_id, record, begin, end)
        yield span

    def _widen(self, trace_id: str, record: Mapping[str, Any], begin: int, end: int) -> None:
        bounds = self._bounds.get(trace_id)
        if bounds is None:
            self._bounds[trace_id] = bounds = _Bounds(begin, end, {"langfuse.trace.id": trace_id})
        bounds.begin_ns, bounds.end_ns = min(bounds.begin_ns, begin), max(bounds.end_ns, end)
        for name, field in (("session.id", "sessionId"), ("user.id", "userId"), ("langfuse.trace.name", "traceName")):
            if record.get(field):
                bounds.more.setdefault(name, record[field])
        if not record.get("parentObservationId") and record.get("level") == "ERROR":
            bounds.failed = str(record.get("statusMessage") or "ERROR")

    def _score(self, record: Mapping[str, Any]) -> Iterator[Converted]:
        if not record.get("traceId"):
            self._account.leave_out("score_of_no_trace")
            return
        trace = Trace(_NAME, id_in(record, "traceId"), self._origin)
        observation = record.get("observationId")
        value = record.get("value")
        label = record.get("stringValue") or (value if isinstance(value, str) else None)
        is_number = isinstance(value, (int, float))
        yield trace.evaluation(
            id_in(record, "id"),
            id_in(record, "name"),
            score=number_of(value) if is_number else None,
            label=str(label) if label is not None else None,
            time_ns=nanoseconds(record.get("timestamp") or record.get("createdAt"), "timestamp"),
            span_id=trace.span_id(observation) if isinstance(observation, str) and observation else None,
            explanation=record.get("comment"),
            is_human=record.get("source") == "ANNOTATION",
            more=kept_fields("langfuse.score", record, _SCORE_FIELDS),
        )


def _attributes(record: Mapping[str, Any]) -> JsonObject:
    """Of an observation: the conventions' where they have one, and every other field under `langfuse.observation.`.

    That a generation is a call is only Langfuse's word, as on its SDK's spans: it may be any function, with calls below it.
    """
    kind, used = str(record["type"]).upper(), list(_OBSERVATION_FIELDS)
    attributes: JsonObject = {}
    if kind == "GENERATION":
        attributes, used = _generation(record), [*used, "model"]
    elif kind == "TOOL":
        attributes = tool_attributes(record.get("name"), record.get("input"), record.get("output"))
    elif kind == "AGENT":
        attributes = {keys.GEN_AI_OPERATION: keys.OPERATION_INVOKE_AGENT, keys.GEN_AI_AGENT_NAME: record.get("name")}
    if keys.GEN_AI_INPUT_MESSAGES in attributes or kind == "TOOL":
        used.append("input")
    if keys.GEN_AI_OUTPUT_MESSAGES in attributes or kind == "TOOL":
        used.append("output")
    if kind == "GENERATION":
        attributes |= {
            f"langfuse.observation.{name}.{field}": value
            for name in ("input", "output")
            if name in used
            for field, value in other_fields(record.get(name)).items()
        }
    return {
        **attributes,
        "session.id": record.get("sessionId"),
        "user.id": record.get("userId"),
        "langfuse.observation.prompt.name": record.get("promptName"),
        "langfuse.observation.prompt.version": record.get("promptVersion"),
        "langfuse.observation.model.parameters": record.get("modelParameters") or None,
        **_metadata("langfuse.observation.metadata", record.get("metadata")),
        **{name: record.get(field) for field, name in _RENAMED.items()},
        **kept_fields("langfuse.observation", record, (*used, *_RENAMED)),
        "langfuse.observation.type": kind.lower(),
    }


def _generation(record: Mapping[str, Any]) -> JsonObject:
    usage = record.get("usageDetails") or record.get("usage") or {}
    costs = record.get("costDetails") or {}
    parameters = record.get("modelParameters")
    metadata = record.get("metadata")
    tools = tools_in(record.get("input")) or tools_in(metadata)
    reason = metadata.get("finish_reason") if isinstance(metadata, dict) else None
    stated = {"finish_reason": reason} if isinstance(reason, str) else {}
    attributes = call_attributes(
        model=record.get("model") or record.get("providedModelName"),
        inputs=messages_in(record.get("input")),
        outputs=[{**stated, **answer} for answer in outputs_in(record.get("output"))],
        tools=tools,
        input_tokens=_first(usage, "input", "promptTokens", "input_tokens"),
        output_tokens=_first(usage, "output", "completionTokens", "output_tokens"),
        cost=_first(costs, "total") or record.get("calculatedTotalCost") or record.get("totalCost"),
        parameters=parameters if isinstance(parameters, dict) else None,
    )
    del attributes[keys.GEN_AI_OPERATION]
    return attributes


def _first(record: Any, *names: str) -> Any:
    return (
        next((record[name] for name in names if record.get(name) is not None), None)
        if isinstance(record, dict)
        else None
    )


def _metadata(prefix: str, value: Any) -> JsonObject:
    if isinstance(value, dict):
        return kept_fields(prefix, value)
    return {prefix: text_of(value)} if value not in (None, "", []) else {}


def _camel(name: str) -> str:
    return _SNAKE.sub(lambda match: match[1].upper(), name)


def _is_trace(record: Mapping[str, Any]) -> bool:
    return (
        "timestamp" in record
        and isinstance(record.get("id"), str)
        and not record.keys() & {"traceId", "value", "dataType"}
    )


def _is_observation(record: Mapping[str, Any]) -> bool:
    return {"id", "traceId", "type", "startTime"} <= record.keys()


def _is_score(record: Mapping[str, Any]) -> bool:
    return {"id", "name", "source"} <= record.keys() and bool({"value", "stringValue"} & record.keys())


def _is_langfuse(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("data"), list):
        return _is_langfuse(value["data"][0]) if value["data"] else value.keys() == {"data", "meta"}
    record = {_camel(name): item for name, item in value.items()}
    is_trace = _is_trace(record) and bool(
        record.keys() & {"htmlPath", "observations", "scores", "sessionId", "release", "public"}
    )
    return is_trace or _is_observation(record) or (_is_score(record) and "traceId" in record)


LANGFUSE = Format(_NAME, "Langfuse", _is_langfuse, _LangfuseReader)
