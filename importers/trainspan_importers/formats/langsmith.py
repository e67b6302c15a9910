"""LangSmith: runs as JSON lines, with their feedback within them or in lines of its own.

Schema: https://docs.langchain.com/langsmith/run-data-format and the feedback of its API.
"""

from collections.abc import Iterator, Mapping
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

__all__ = ["LANGSMITH"]

_NAME: Final = "langsmith"
_RUN_FIELDS: Final = (
    *("id", "trace_id", "parent_run_id", "name", "start_time", "end_time", "error", "extra", "feedback", "child_runs"),
    *("prompt_tokens", "completion_tokens", "total_cost", "reference_example_id"),
)
_SESSIONS: Final = ("session_id", "thread_id", "conversation_id")
_USERS: Final = ("user_id", "userId")
_AGENTS: Final = ("lc_agent_name", "langgraph_node", "agent_name")
_FEEDBACK_FIELDS: Final = (
    *("id", "run_id", "trace_id", "key", "score", "value", "comment", "created_at", "modified_at"),
)


class _LangsmithReader(Reader):
    def __init__(self, account: Account) -> None:
        self._account = account
        self._origin = origin_of(_NAME)
        self._homeless: dict[str, list[Mapping[str, Any]]] = {}
        """Run → feedback that does not name its trace, until the run comes."""

    def add(self, value: Any) -> Iterator[Converted]:
        if not isinstance(value, dict):
            raise InvalidRecordError("no object")
        for name in ("runs", "data"):
            yield from each(value[name] if isinstance(value.get(name), list) else (), self.add)
        if _is_run(value):
            yield from self._run(value)
        elif _is_feedback(value):
            yield from self._feedback(value)
        elif not value.keys() & {"runs", "data", "cursors"}:
            raise InvalidRecordError("neither a run nor feedback")

    def end(self) -> Iterator[Converted]:
        self._account.leave_out("feedback_of_no_run", n_parts=sum(map(len, self._homeless.values())))
        return iter(())

    def _run(self, run: Mapping[str, Any]) -> Iterator[Converted]:
        run_id, parent = id_in(run, "id"), run.get("parent_run_id")
        trace = Trace(_NAME, str(run.get("trace_id") or run_id), self._origin)
        begin = nanoseconds(run["start_time"], "start_time")
        end = nanoseconds(run["end_time"], "end_time") if run.get("end_time") else begin
        yield trace.span(
            trace.span_id(run_id),
            trace.span_id(parent) if isinstance(parent, str) else None,
            str(run.get("name") or run["run_type"]),
            begin,
            end,
            _attributes(run, is_root=not isinstance(parent, str)),
            error=text_of(run["error"]) if run.get("error") else None,
        )
        feedback = run.get("feedback")
        for item in (*(feedback if isinstance(feedback, list) else ()), *self._homeless.pop(run_id, ())):
            yield from self._feedback({"run_id": run_id, "trace_id": trace.source_id, **item})
        for child in run.get("child_runs") or ():
            yield from self._run({"trace_id": trace.source_id, "parent_run_id": run_id, **child})

    def _feedback(self, feedback: Mapping[str, Any]) -> Iterator[Converted]:
        if not feedback.get("run_id"):
            self._account.leave_out("feedback_of_no_run")
            return
        run_id = id_in(feedback, "run_id")
        if not isinstance(feedback.get("trace_id"), str):
            self._homeless.setdefault(run_id, []).append(feedback)
            return
        trace = Trace(_NAME, feedback["trace_id"], self._origin)
        score, value = feedback.get("score"), feedback.get("value")
        source = feedback.get("feedback_source")
        yield trace.evaluation(
            id_in(feedback, "id"),
            id_in(feedback, "key"),
            score=number_of(score) if isinstance(score, (bool, int, float)) else None,
            label=None if value is None else text_of(value),
            time_ns=nanoseconds(feedback.get("created_at") or feedback.get("modified_at"), "created_at"),
            span_id=trace.span_id(run_id),
            explanation=feedback.get("comment"),
            is_human=isinstance(source, dict) and source.get("type") == "app",
            more=kept_fields("langsmith.feedback", feedback, _FEEDBACK_FIELDS),
        )


def _attributes(run: Mapping[str, Any], *, is_root: bool) -> JsonObject:
    """Of a run: the conventions' where they have one, and every other field under `langsmith.`."""
    extra = run.get("extra") if isinstance(run.get("extra"), dict) else {}
    assert isinstance(extra, dict)
    metadata = extra.get("metadata") if isinstance(extra.get("metadata"), dict) else {}
    assert isinstance(metadata, dict)
    used = [*_RUN_FIELDS]
    attributes: JsonObject = {}
    if run["run_type"] == "llm":
        attributes = _call(run, extra, metadata)
    elif run["run_type"] == "tool":
        attributes = tool_attributes(run.get("name"), _tool_input(run.get("inputs")), _tool_output(run.get("outputs")))
    if keys.GEN_AI_INPUT_MESSAGES in attributes or "gen_ai.tool.call.arguments" in attributes:
        used.append("inputs")
    if keys.GEN_AI_OUTPUT_MESSAGES in attributes or "gen_ai.tool.call.result" in attributes:
        used.append("outputs")
    if run["run_type"] == "llm":
        attributes |= {
            f"langsmith.{name}.{field}": value
            for name in ("inputs", "outputs")
            if name in used
            for field, value in other_fields(run.get(name)).items()
        }
    return {
        **attributes,
        keys.TASK_ID: run.get("reference_example_id") if is_root else None,
        "session.id": _first(metadata, _SESSIONS),
        "user.id": _first(metadata, _USERS),
        **kept_fields("langsmith.metadata", metadata),
        **kept_fields("langsmith.extra", extra, ("metadata",)),
        **kept_fields("langsmith", run, used),
    }


def _call(run: Mapping[str, Any], extra: Mapping[str, Any], metadata: Mapping[str, Any]) -> JsonObject:
    asked = extra.get("invocation_params") if isinstance(extra.get("invocation_params"), dict) else {}
    assert isinstance(asked, dict)
    inputs, outputs = run.get("inputs") or {}, run.get("outputs") or {}
    usage = outputs.get("usage_metadata") or {}
    parameters = {name.removeprefix("ls_"): value for name, value in metadata.items() if name.startswith("ls_")}
    return call_attributes(
        model=metadata.get("ls_model_name") or asked.get("model") or asked.get("model_name") or inputs.get("model"),
        provider=metadata.get("ls_provider"),
        agent=_first(metadata, _AGENTS),
        inputs=messages_in(inputs),
        outputs=outputs_in(outputs),
        response_id=outputs.get("id"),
        tools=tools_in(inputs) or tools_in(asked),
        input_tokens=run.get("prompt_tokens") or usage.get("input_tokens"),
        output_tokens=run.get("completion_tokens") or usage.get("output_tokens"),
        cost=run.get("total_cost"),
        parameters={**parameters, **inputs, **asked},
    )


def _tool_input(inputs: Any) -> Any:
    """The arguments: LangChain has them as text under `input`."""
    return inputs["input"] if isinstance(inputs, dict) and set(inputs) == {"input"} else inputs


def _tool_output(outputs: Any) -> Any:
    if not isinstance(outputs, dict) or set(outputs) != {"output"}:
        return outputs
    output = outputs["output"]
    fields = output.get("kwargs", output) if isinstance(output, dict) else {}
    return fields["content"] if isinstance(fields, dict) and "content" in fields else output


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if isinstance(record.get(name), str) and record[name]), None)


def _is_run(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("run_type"), str) and "start_time" in value


def _is_feedback(value: Mapping[str, Any]) -> bool:
    return "run_id" in value and "key" in value


def _is_langsmith(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    for name in ("runs", "data"):
        if isinstance(value.get(name), list):
            return bool(value[name]) and _is_langsmith(value[name][0])
    return _is_run(value) or _is_feedback(value)


def _is_of_feedback(value: Any) -> bool:
    return isinstance(value, dict) and _is_feedback(value)


LANGSMITH = Format(_NAME, "LangSmith", _is_langsmith, _LangsmithReader, comes_first=_is_of_feedback)
