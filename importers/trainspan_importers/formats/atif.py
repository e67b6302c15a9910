"""ATIF: the Agent Trajectory Interchange Format, which Harbor writes, versions 1.0 to 1.8.

Schema: https://harborframework.com/docs/trajectory-format. One JSON object is one trajectory: its steps are those of the system, the
user and the agent; an agent's step is one model call, with the results of the tools that it called. Of `extra`, which each writer
fills as it likes, what `trainspan export atif` keeps there is understood.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trainspan_importers.account import Account
from trainspan_importers.conversation import Conversation
from trainspan_importers.reading import Converted, Format, Reader
from trainspan_importers.recorded import message_of, number_of, text_of
from trainspan_importers.traces import UNDATED_NS, Trace, compact_json, kept_fields, nanoseconds, origin_of
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs

__all__ = ["ATIF"]

_NAME: Final = "atif"
_TOKENS: Final = ("prompt_token_ids", "completion_token_ids", "logprobs")
_STEP_FIELDS: Final = (
    *("step_id", "timestamp", "source", "model_name", "message", "reasoning_content", "tool_calls", "observation"),
    *("metrics", "is_copied_context", "extra"),
)
_OF_MESSAGE: Final = ("role", "name", "tool_call_id")
_OF_CALL: Final = ("gen_ai.request.", "gen_ai.response.", "gen_ai.usage.", keys.GEN_AI_TOOL_DEFINITIONS)
"""Members of `extra` that are read: those of a message, and how the names of attributes of a call begin."""
_ROOT_FIELDS: Final = ("agent", "steps", "session_id", "subagent_trajectories")


class _AtifReader(Reader):
    def __init__(self, account: Account) -> None:
        self._account = account

    def add(self, value: Any) -> Iterator[Converted]:
        if not _is_atif(value):
            raise InvalidRecordError("no trajectory with schema_version and steps")
        agent = value.get("agent") or {}
        name = str(agent.get("name") or _NAME)
        source_id = str(value.get("trajectory_id") or value.get("session_id") or compact_json(value))
        trace = Trace(_NAME, source_id, origin_of(name, **{"service.version": agent.get("version")}))
        yield from self._trajectory(trace, value, None, "")
        if (reward := number_of(_extra(value).get(keys.REWARD))) is not None:
            yield trace.evaluation(source_id, keys.REWARD, score=reward, time_ns=_times(value["steps"])[-1])

    def _trajectory(
        self, trace: Trace, value: Mapping[str, Any], parent: bytes | None, prefix: str
    ) -> Iterator[Converted]:
        """The span of an agent, within it its steps and the trajectories embedded in it. `prefix` tells its steps from others'."""
        agent = value.get("agent") or {}
        name = str(agent.get("name") or _NAME)
        times = _times(value["steps"])
        span_id = trace.root_id if parent is None else trace.span_id(f"{trace.source_id} {prefix}")
        yield trace.span(span_id, parent, name, times[0], times[-1], _about(value, agent, name))
        tools = agent.get("tool_definitions")
        conversation = Conversation(trace, span_id, tools if isinstance(tools, list) else ())
        begin = times[0]
        for number, (step, end) in enumerate(zip(value["steps"], times, strict=True)):
            key = f"{prefix}{step.get('step_id', number)}"
            is_copy = step.get("is_copied_context") or step.get("llm_call_count") == 0
            if step.get("source") == "agent" and not is_copy:
                yield from self._answer(conversation, step, key, (begin, end), agent, name)
            else:
                yield from conversation.put(_message(step), key, end)
            results = _results(step)
            if results is not None:
                yield from conversation.put(results, f"{key} results", end)
            begin = end
        for number, inner in enumerate(value.get("subagent_trajectories") or ()):
            if _is_atif(inner):
                if number_of(_extra(inner).get(keys.REWARD)) is not None:
                    self._account.leave_out("rewards of sub-agents")
                yield from self._trajectory(trace, inner, span_id, f"{prefix}{number}:")
            else:
                self._account.leave_out("sub-agents without steps")

    def _answer(
        self,
        conversation: Conversation,
        step: Mapping[str, Any],
        key: str,
        times: tuple[int, int],
        agent: Mapping[str, Any],
        name: str,
    ) -> Iterator[Converted]:
        metrics, extra = step.get("metrics") or {}, _extra(step)
        tokens = _token_attributes(metrics)
        if not tokens and any(metrics.get(field) for field in _TOKENS):
            self._account.leave_out("tokens without ids, or without log-probabilities of all")
        more = {
            **tokens,
            "gen_ai.usage.cache_read.input_tokens": metrics.get("cached_tokens"),
            **kept_fields(
                "atif.metrics", metrics, (*_TOKENS, "prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
            ),
            **kept_fields("atif.step", step, _STEP_FIELDS),
            **kept_fields("atif.step.extra", extra, [field for field in extra if field.startswith(_OF_CALL)]),
            **{field: item for field, item in extra.items() if field.startswith(_OF_CALL)},
        }
        yield from conversation.answer(
            _message(step),
            key,
            *times,
            more,
            model=step.get("model_name") or agent.get("model_name"),
            agent=name,
            input_tokens=metrics.get("prompt_tokens"),
            output_tokens=metrics.get("completion_tokens"),
            cost=metrics.get("cost_usd"),
        )


def _about(value: Mapping[str, Any], agent: Mapping[str, Any], name: str) -> JsonObject:
    return {
        "session.id": value.get("session_id"),
        keys.GEN_AI_OPERATION: keys.OPERATION_INVOKE_AGENT,
        keys.GEN_AI_AGENT_NAME: name,
        **kept_fields("atif.agent", agent, ("name", "version", "model_name", "tool_definitions")),
        **kept_fields("atif", value, _ROOT_FIELDS),
    }


def _message(step: Mapping[str, Any]) -> JsonObject:
    role = {"agent": "assistant"}.get(str(step.get("source")), str(step.get("source") or "user"))
    calls = [
        {
            "id": call.get("tool_call_id"),
            "function": {
                "name": call.get("function_name"),
                "arguments": _extra(call).get("arguments", call.get("arguments")),
            },
        }
        for call in step.get("tool_calls") or ()
    ]
    fields = {"role": role, "content": step.get("message"), "reasoning_content": step.get("reasoning_content")}
    identity = {field: item for field, item in _extra(step).items() if field in _OF_MESSAGE and isinstance(item, str)}
    return message_of({**fields, "tool_calls": calls, **({} if role == "assistant" else identity)})


def _extra(record: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = record.get("extra")
    return extra if isinstance(extra, dict) else {}


def _results(step: Mapping[str, Any]) -> JsonObject | None:
    """What the environment answered; without the id of a call it is a message of the user's, as agents without tools see it."""
    results = (step.get("observation") or {}).get("results") or []
    parts = [
        {"type": "tool_result", "tool_use_id": item.get("source_call_id"), "content": text_of(item.get("content"))}
        for item in results
    ]
    if not parts:
        return None
    if all(item["tool_use_id"] is None for item in parts):
        return message_of({"role": "user", "content": "\n".join(item["content"] for item in parts)})
    return {"role": "tool", "parts": message_of({"role": "user", "content": parts})["parts"]}


def _token_attributes(metrics: Mapping[str, Any]) -> JsonObject:
    """The tokens, if they are whole: ids of prompt and answer, and a log-probability of each token of the answer."""
    prompt, answer, logprobs = (metrics.get(field) for field in _TOKENS)
    if not (isinstance(prompt, list) and isinstance(answer, list) and isinstance(logprobs, list)):
        return {}
    ids = [*prompt, *answer]
    are_ids = all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**31 for number in ids)
    are_numbers = all(isinstance(number, (int, float)) and math.isfinite(number) for number in logprobs)
    if not (prompt and answer and are_ids and are_numbers and len(answer) == len(logprobs)):
        return {}
    return {
        keys.PROMPT_TOKEN_IDS: encode_ids(prompt),
        keys.COMPLETION_TOKEN_IDS: encode_ids(answer),
        keys.COMPLETION_LOGPROBS: encode_logprobs(logprobs),
        keys.CALL_RECORDED_BY: "client",
    }


def _times(steps: list[Mapping[str, Any]]) -> list[int]:
    """When each step was there; one without a time is a microsecond after the one before."""
    times: list[int] = []
    for number, step in enumerate(steps):
        stated = step.get("timestamp")
        if stated is None:
            times.append(times[-1] + 1000 if times else UNDATED_NS)
        else:
            times.append(nanoseconds(stated, f"timestamp of step {number + 1}"))
    return times


def _is_atif(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("steps"), list)
        and bool(value["steps"])
        and all(isinstance(step, dict) for step in value["steps"])
        and str(value.get("schema_version", "")).upper().startswith(("ATIF", "1."))
    )


ATIF = Format(_NAME, "ATIF", _is_atif, _AtifReader)
