"""Rollouts as trajectories of ATIF, the Agent Trajectory Interchange Format that Harbor defines, version 1.7.

Schema: https://harborframework.com/docs/trajectory-format. A trajectory is one conversation; an agent's step is one model call, with
the results of the tools that it called. A rollout with several conversations (sub-agents, rewritten histories) is the trajectory
of the one with the most calls, with the others in `subagent_trajectories`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import polars as pl

from trainspan_processing.export.candidates import Examples, offered_tools
from trainspan_processing.export.conversations import RecordedCall, read_conversations
from trainspan_processing.export.labeled_pairs import LEFT_OUT
from trainspan_processing.read.json_attributes import with_facts
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.tokens import chunk_number
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY, Schema, empty
from trainspan_processing.text.chat_messages import ChatMessage, same_messages
from trainspan_processing.text.dialects import messages_of
from trainspan_processing.text.model_calls import is_whole
from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = ["SpanTokens", "trajectories", "trajectory"]

_VERSION: Final = "ATIF-v1.7"
_SOURCES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_METRICS: Final = {
    "prompt_tokens": (keys.GEN_AI_INPUT_TOKENS, "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
    "completion_tokens": (keys.GEN_AI_OUTPUT_TOKENS, "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
    "cached_tokens": ("gen_ai.usage.cache_read.input_tokens", "llm.token_count.prompt_details.cache_read"),
    "cost_usd": ("gen_ai.usage.cost", "llm.cost.total"),
}
"""Field of a step's metrics → attributes that may state it, in any dialect."""
_OF_METRICS: Final = {key for attributes in _METRICS.values() for key in attributes}
_IN_FIELDS: Final = {keys.GEN_AI_REQUEST_MODEL, *_OF_METRICS}
_OF_OUTPUT: Final = ("llm.finish_reason", "gen_ai.output.messages", "llm.output_messages.", "output.value", "langfuse.")
"""How the names of attributes begin of which only the finish reason is not in the step's message."""
_IDENTITY: Final = (*ROLLOUT_KEY, "run_id", "round", "task_id", "reward")
_ROLLOUTS_PER_READ: Final = 500
_SIZES: Final[Schema] = {"rollout_id": pl.String, "calls": pl.Int64, "tokens": pl.Int64}
_OF_TOKENS: Final = (*SPAN_KEY, "response_id", "call_facts", "prompt_ids", "completion_ids", "logprobs")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class SpanTokens:
    """The tokens of one call as stored."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float] | None
    response_id: str | None
    choice: int
    """Number of the answer among those of the response."""


def trajectories(
    source: Source, rollouts: pl.DataFrame, agents: frozenset[str], examples: Examples
) -> Iterator[JsonObject]:
    """The trajectory of each of `rollouts` (rollout_id, attempt, run_id, round, task_id, reward, reason), rewarded or not.

    Counts them in `examples`, whose `groups` are rollouts here. Reasons that count rollouts: those of LEFT_OUT, `branch` (it
    repeats another rollout's answers), `no_text` (no call has messages). The other reasons are those of `trajectory`, and
    `no_messages` (only the policy server recorded the call).
    """
    is_branch = pl.col("task_id").str.contains(BRANCH_TASK).fill_null(value=False)
    why = pl.when(pl.col("reason").is_in(LEFT_OUT)).then("reason").when(is_branch).then(pl.lit("branch"))
    marked = rollouts.sort(ROLLOUT_KEY).select(*_IDENTITY, why.alias("why"))
    examples.groups = rollouts.height
    examples.skipped.update(marked["why"].drop_nulls().to_list())
    for part in _chunks(source, marked.filter(pl.col("why").is_null())):
        about = {(row["rollout_id"], row["attempt"]): row for row in part.iter_rows(named=True)}
        tokens = _read_tokens(source, sorted({rollout_id for rollout_id, _ in about}))
        for key, calls in read_conversations(source, sorted(about)):
            stored = _tokens_by_span(tokens.pop(key, None))
            recorded = {span for call in calls if call.record for span in call.record.spans}
            if unread := len(stored.keys() - recorded):
                examples.skipped["no_messages"] += unread
            document = trajectory(about[key], calls, stored, agents, examples)
            if document is None:
                examples.skipped["no_text"] += 1
                continue
            examples.groups_used += 1
            examples.sources.append({name: about[key][name] for name in (*ROLLOUT_KEY, "reward")})
            yield document


def _chunks(source: Source, rollouts: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The rollouts in order, as many together as `chunk_number` puts into a chunk by their stored tokens."""
    for part in rollouts.iter_slices(_ROLLOUTS_PER_READ):
        selection = Selection(rollout_ids=part["rollout_id"].unique().sort().to_list())
        read = source.read("sizes", selection, list(_SIZES), rows=_ROLLOUTS_PER_READ)
        counted = pl.concat([empty(_SIZES), *(batch.select(*_SIZES) for batch in read)]).group_by("rollout_id").sum()
        sized = part.join(counted, on="rollout_id", how="left", maintain_order="left")
        numbers = chunk_number(sized["calls"].fill_null(0), sized["tokens"].fill_null(0))
        yield from part.with_columns(numbers.alias("chunk")).partition_by(
            "chunk", maintain_order=True, include_key=False
        )


def _read_tokens(source: Source, rollout_ids: Sequence[str]) -> dict[tuple[str, int], pl.DataFrame]:
    """Rollout → its calls with tokens, still as columns: as Python's numbers they would take ten times the memory."""
    columns = [*ROLLOUT_KEY, *_OF_TOKENS]
    has_tokens = (pl.col("prompt_ids").list.len() > 0) & (pl.col("completion_ids").list.len() > 0)
    frames: dict[tuple[str, int], list[pl.DataFrame]] = {}
    for batch in source.read("calls", Selection(rollout_ids=rollout_ids), columns):
        calls = batch.select(columns).filter(has_tokens).with_columns(pl.col("attempt").fill_null(0))
        for (rollout_id, attempt), part in calls.partition_by(ROLLOUT_KEY, as_dict=True).items():
            frames.setdefault((str(rollout_id), int(str(attempt))), []).append(part)
    return {key: pl.concat(parts) for key, parts in frames.items()}


def _tokens_by_span(calls: pl.DataFrame | None) -> dict[tuple[str, str], SpanTokens]:
    """Trace and span id of each of a rollout's calls → its tokens."""
    if calls is None:
        return {}
    stated = with_facts(calls, numbers={"choice": keys.CHOICE_INDEX}, booleans={}, texts={})
    columns = (*SPAN_KEY, "prompt_ids", "completion_ids", "logprobs", "response_id", "choice")
    return {
        (trace_id, span_id): SpanTokens(prompt, answer, logprobs, response, int(choice or 0))
        for trace_id, span_id, prompt, answer, logprobs, response, choice in stated.select(columns).iter_rows()
    }


def trajectory(
    rollout: Mapping[str, Any],
    calls: Sequence[RecordedCall],
    tokens: Mapping[tuple[str, str], SpanTokens],
    agents: frozenset[str],
    examples: Examples,
) -> JsonObject | None:
    """One rollout (rollout_id, attempt, run_id, round, task_id, reward) as a trajectory; None if no call of it can be a step.

    `tokens` are those of its calls by trace and span id. Counts calls in `examples.skipped`: `not_selected` (of other agents than
    `agents`), `other_parts` (with images or files, which the messages lack), `unmatched_tokens` (of another response or choice than
    the step's answer, or not known to be of it: the step has none), `invalid_logprobs` (NaN or infinite: the step has only the ids).
    """
    conversations: list[_Conversation] = []
    for call in calls:
        if agents and call.agent not in agents:
            examples.skipped["not_selected"] += 1
            continue
        if call.flaw is not None or isinstance(call.prompt, str) or isinstance(call.answer, str):
            examples.skipped[call.flaw or "no_messages"] += 1
            continue
        prompt_keys = [_message_key(message) for message in call.prompt]
        begun = [each for each in reversed(conversations) if each.is_begin_of(prompt_keys)]
        continued = max(begun, key=lambda each: each.n_messages, default=None)
        if continued is None:
            continued = _Conversation(call)
            conversations.append(continued)
        continued.add(call, call.prompt, call.answer, _metrics(call, tokens, examples), _extra_of(call, examples))
    if not conversations:
        return None
    main = max(conversations, key=lambda each: each.n_calls)
    others = [each for each in conversations if each is not main]
    name = f"{rollout['rollout_id']}/{rollout['attempt']}"
    facts = _without_none({key: rollout[key] for key in _IDENTITY})
    inner = [each.document(f"{name}.{number}", rollout["rollout_id"]) for number, each in enumerate(others, start=1)]
    cost = [each["final_metrics"]["total_cost_usd"] for each in inner if "total_cost_usd" in each["final_metrics"]]
    document = main.document(name, rollout["rollout_id"], sum(cost) if cost else None)
    return {**document, "extra": facts, **({"subagent_trajectories": inner} if inner else {})}


def _message_key(message: ChatMessage) -> str:
    """What must be equal for a message to be the same: not the reasoning, which many clients leave out of the history."""
    return same_messages([{key: value for key, value in message.items() if key != "reasoning_content"}])


def _metrics(call: RecordedCall, tokens: Mapping[tuple[str, str], SpanTokens], examples: Examples) -> JsonObject:
    spans, facts = (call.record.spans, call.record.facts) if call.record else ((), {})
    stated = {
        name: next((facts[key] for key in attributes if _is_number(facts.get(key))), None)
        for name, attributes in _METRICS.items()
    }
    of_spans = [tokens[span] for span in spans if span in tokens]
    of_call = _tokens_of_answer(of_spans, facts.get(keys.GEN_AI_RESPONSE_ID))
    if of_call is None:
        if of_spans:
            examples.skipped["unmatched_tokens"] += 1
        return _without_none(stated)
    logprobs = of_call.logprobs
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        examples.skipped["invalid_logprobs"] += 1
        logprobs = None
    counts = {"prompt_tokens": len(of_call.prompt_ids), "completion_tokens": len(of_call.completion_ids)}
    ids = {"prompt_token_ids": list(of_call.prompt_ids), "completion_token_ids": list(of_call.completion_ids)}
    return {**_without_none(stated), **counts, **ids, **({"logprobs": list(logprobs)} if logprobs is not None else {})}


def _tokens_of_answer(of_spans: Sequence[SpanTokens], response_id: object) -> SpanTokens | None:
    """The tokens of a client's answer: those of the first choice of the response that the client names.

    None if these are not stored, or if several responses are below it and the client may not have named one: then `response_id`
    is that of the first span.
    """
    firsts = [each for each in of_spans if each.choice == 0]
    responses = {each.response_id for each in firsts}
    if responses == {None}:
        return firsts[0] if len(firsts) == 1 else None
    if len(responses) > 1 and response_id == firsts[0].response_id:
        return None
    return next((each for each in firsts if each.response_id == response_id), None)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_invalid(key: str, value: object) -> bool:
    return not _is_number(value) if key in _OF_METRICS else isinstance(value, float) and not math.isfinite(value)


def _extra_of(call: RecordedCall, examples: Examples) -> JsonObject:
    """What the spans say beside message and metrics, with the finish reasons; counts `invalid_numbers` (NaN, infinite or none)."""
    if call.record is None:
        return {}
    facts = call.record.facts
    extra = {key: value for key, value in facts.items() if key not in _IN_FIELDS and not key.startswith(_OF_OUTPUT)}
    invalid = [key for key, value in facts.items() if (key in _OF_METRICS or key in extra) and _is_invalid(key, value)]
    if invalid:
        examples.skipped["invalid_numbers"] += len(invalid)
    _, outputs = messages_of(facts)
    of_output = facts.get("llm.finish_reason") or (outputs[0].get("finish_reason") if outputs else None)
    # Of an answer that is cut off without a reason is known that it has all the tokens that the request allowed.
    stated = [facts.get(keys.GEN_AI_FINISH_REASONS), [of_output] if isinstance(of_output, str) else None]
    known = [reasons for reasons in (*stated, None if call.is_whole else ["length"]) if reasons]
    if not call.is_whole:
        known = [reasons for reasons in known if not is_whole({keys.GEN_AI_FINISH_REASONS: reasons}, [])]
    return {
        **{key: value for key, value in extra.items() if key not in invalid},
        **({keys.GEN_AI_FINISH_REASONS: known[0]} if known else {}),
    }


@dataclass(slots=True)
class _Conversation:
    """The steps of calls of which each continues the messages of the one before."""

    first: RecordedCall
    n_calls: int = 0
    _messages: list[str] = field(default_factory=list)
    """Keys of the messages so far."""
    _steps: list[JsonObject] = field(default_factory=list)

    @property
    def n_messages(self) -> int:
        return len(self._messages)

    def is_begin_of(self, prompt_keys: Sequence[str]) -> bool:
        return self._messages == list(prompt_keys[: len(self._messages)])

    def add(
        self,
        call: RecordedCall,
        prompt: Sequence[ChatMessage],
        answer: Sequence[ChatMessage],
        metrics: JsonObject,
        extra: JsonObject,
    ) -> None:
        """Adds what the prompt has beyond the messages so far, and the answer. Answers that no call gave are copied context."""
        record = call.record
        for message in prompt[len(self._messages) :]:
            self._put(message, None if record is None else record.start_ns, {"is_copied_context": True})
        if call.tools != self.first.tools:
            extra = {**extra, keys.GEN_AI_TOOL_DEFINITIONS: f"[{','.join(call.tools)}]"}
        about = {
            "model_name": call.model if call.model != self.first.model else None,
            "llm_call_count": 1,
            "metrics": metrics or None,
            "extra": extra or None,
        }
        for message in answer:
            self._put(message, None if record is None else record.end_ns, about)
        self.n_calls += 1

    def _put(self, message: ChatMessage, time_ns: int | None, of_answer: JsonObject) -> None:
        self._messages.append(_message_key(message))
        role = str(message["role"])
        last = self._steps[-1] if self._steps else {}
        if role == "tool" and last.get("source") == "agent":
            results: list[JsonObject] = last.setdefault("observation", {"results": []})["results"]
            results.append(_result(message, last.get("tool_calls") or [], results))
            return
        step: JsonObject = {"step_id": len(self._steps) + 1, "source": _SOURCES.get(role, "user")}
        if time_ns is not None:
            step["timestamp"] = (_EPOCH + timedelta(microseconds=time_ns // 1000)).isoformat()
        step["message"] = message["content"]
        if step["source"] == "agent":
            step |= _without_none({"reasoning_content": message.get("reasoning_content"), **of_answer})
            if tool_calls := message.get("tool_calls"):
                step["tool_calls"] = [
                    _tool_call(call, f"call_{step['step_id']}_{n}") for n, call in enumerate(tool_calls)
                ]
        elif rest := {key: value for key, value in message.items() if key in ("name", "tool_call_id")} | (
            {} if role == step["source"] else {"role": role}
        ):
            step["extra"] = rest
        self._steps.append(step)

    def document(self, name: str, session: str, more_cost: float | None = None) -> JsonObject:
        """The trajectory, with the id `name`; `more_cost` is that of its sub-agents in USD."""
        totals: JsonObject = {"total_steps": len(self._steps)}
        for field_name in _METRICS:
            known = [step["metrics"][field_name] for step in self._steps if field_name in step.get("metrics", {})]
            if known:
                totals[f"total_{field_name}"] = sum(known)
        if more_cost is not None:
            totals["total_cost_usd"] = totals.get("total_cost_usd", 0) + more_cost
        tools = offered_tools(self.first)
        agent = {
            "name": self.first.agent or "agent",
            "version": "unknown",
            "model_name": self.first.model,
            "tool_definitions": tools.get("tools"),
        }
        identity = {"schema_version": _VERSION, "session_id": session, "trajectory_id": name}
        return {**identity, "agent": _without_none(agent), "steps": self._steps, "final_metrics": totals}


def _tool_call(call: JsonObject, name: str) -> JsonObject:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, dict) and not _is_strict_json(arguments):
        arguments = json.dumps(arguments)
    is_object = isinstance(arguments, dict)
    tool_call = {
        "tool_call_id": call.get("id") or name,
        "function_name": function["name"],
        "arguments": arguments if is_object else {},
    }
    return tool_call if is_object else {**tool_call, "extra": {"arguments": arguments}}


def _is_strict_json(value: JsonObject) -> bool:
    """Whether no number in it is NaN or infinite."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _result(message: ChatMessage, tool_calls: Sequence[JsonObject], results: Sequence[JsonObject]) -> JsonObject:
    """A tool's result, of the call that it names, else of the first one without a result: ids may differ in the history."""
    ids = [call["tool_call_id"] for call in tool_calls]
    for result in results:
        if result.get("source_call_id") in ids:
            ids.remove(result["source_call_id"])
    stated = message.get("tool_call_id")
    call_id = stated if stated in ids else next(iter(ids), None)
    rest = {key: message[key] for key in ("name", "tool_call_id") if key in message and message[key] != call_id}
    return _without_none({"source_call_id": call_id, "content": message["content"], "extra": rest or None})


def _without_none(fields: Mapping[str, Any]) -> JsonObject:
    return {key: value for key, value in fields.items() if value is not None}
