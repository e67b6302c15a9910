"""What one recorded model call is good for, by the attributes of its span alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from trainspan_processing.text.chat_messages import chat_messages, has_whole_parts, only_text
from trainspan_processing.text.dialects import Message, messages_of
from trainspan_processing.text.json_text import parsed
from trainspan_processing.text.langfuse import LANGFUSE_CALL, LANGFUSE_KIND
from trainspan_schemas.telemetry import keys

__all__ = [
    "TextFlaw",
    "TokenFlaw",
    "finish_reasons",
    "is_generation",
    "is_model_call",
    "is_whole",
    "messages_flaw",
    "model_of",
    "text_flaw",
    "token_flaw",
]

TextFlaw = Literal["failed", "no_messages", "no_answer", "cut_off", "other_parts"]
TokenFlaw = Literal["no_token_ids", "no_logprobs"]

_OPERATIONS: Final = (keys.OPERATION_CHAT, keys.OPERATION_TEXT_COMPLETION, "generate_content")
_MODELS: Final = (keys.GEN_AI_REQUEST_MODEL, "llm.model_name", "langfuse.observation.model.name")
_OF_LANGFUSE: Final = ("model.parameters", "usage_details")
_CUT_OFF: Final = {"length", "max_tokens", "content_filter", "error", "abort", "cancelled", "incomplete"}


def is_model_call(attributes: Mapping[str, Any]) -> bool:
    """Whether the span is of a model call, in any dialect."""
    return _is_instrumented(attributes) or attributes.get(LANGFUSE_KIND) == LANGFUSE_CALL


def is_generation(attributes: Mapping[str, Any]) -> bool:
    """Whether Langfuse alone calls the span a model call: it may be any function, with calls of others below it."""
    return attributes.get(LANGFUSE_KIND) == LANGFUSE_CALL and not _is_instrumented(attributes)


def _is_instrumented(attributes: Mapping[str, Any]) -> bool:
    return (
        attributes.get(keys.GEN_AI_OPERATION) in _OPERATIONS
        or attributes.get("llm.request.type") in ("chat", "completion")
        or attributes.get("openinference.span.kind") == "LLM"
    )


def model_of(attributes: Mapping[str, Any]) -> str | None:
    """The name of the model that was asked."""
    return next((name for key in _MODELS if isinstance(name := attributes.get(key), str) and name), None)


def is_whole(attributes: Mapping[str, Any], outputs: list[Message], others: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Whether the answer ended by itself; a truncated answer would teach the model to stop in the middle.

    `others` are the attributes of other spans of the same call: what they say counts if `attributes` do not say why the answer
    ended.
    """
    if reasons := finish_reasons(attributes, outputs):
        return not reasons & _CUT_OFF
    recorded = [(other, messages_of(other)[1]) for other in others]
    if reasons := {reason for other, messages in recorded for reason in finish_reasons(other, messages)}:
        return not reasons & _CUT_OFF
    return not any(_is_used_up(*record) for record in ((attributes, outputs), *recorded))


def finish_reasons(attributes: Mapping[str, Any], outputs: list[Message]) -> set[str]:
    """Why the answer ended, as the span or its message says; empty if it does not say."""
    reasons = (
        attributes.get(keys.GEN_AI_FINISH_REASONS)
        or attributes.get("llm.finish_reason")
        or (outputs[0].get("finish_reason") if outputs else None)
    )
    return {str(reason) for reason in (reasons if isinstance(reasons, list) else [reasons]) if reason is not None}


def _is_used_up(attributes: Mapping[str, Any], outputs: list[Message]) -> bool:
    """Whether the answer used all the tokens that the request allowed. Without a recorded reason this means that it was cut off.

    The tokens of several choices are recorded as a sum, which says nothing about one of them.
    """
    parameters, usage = (parsed(attributes.get(f"langfuse.observation.{name}")) for name in _OF_LANGFUSE)
    limit = _number(attributes, keys.GEN_AI_MAX_TOKENS) or _number(parameters, "max_completion_tokens", "max_tokens")
    used = _number(attributes, keys.GEN_AI_OUTPUT_TOKENS) or _number(
        usage, "output", "completion_tokens", "output_tokens"
    )
    return len(outputs) <= 1 and limit is not None and used is not None and used >= limit


def _number(record: Any, *names: str) -> float | None:
    """The first finite number of these names, which may be written as text."""
    values = (_finite(record.get(name)) for name in names) if isinstance(record, Mapping) else ()
    return next((value for value in values if value is not None), None)


def _finite(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def text_flaw(attributes: Mapping[str, Any], *, failed: bool) -> TextFlaw | None:
    """Why the messages of a call are no example of an answer; None if they are."""
    if failed:
        return "failed"
    inputs, outputs = messages_of(attributes)
    if not inputs:
        return "no_messages"
    if not outputs:
        return "no_answer"
    return messages_flaw(inputs, outputs) if is_whole(attributes, outputs) else "cut_off"


def messages_flaw(
    inputs: list[Message], outputs: list[Message]
) -> Literal["no_messages", "no_answer", "other_parts"] | None:
    """Why recorded messages are no example: texts were not recorded, or they have parts that are no text, or the answer has neither
    text nor calls."""
    if not all(map(has_whole_parts, inputs)):
        return "no_messages"
    if not all(map(has_whole_parts, outputs[:1])):
        return "no_answer"
    if not only_text([*inputs, *outputs[:1]]):
        return "other_parts"
    (answer,) = chat_messages(outputs[:1])
    has_text = outputs[0].get("content") is not None or any(name.startswith("contents.") for name in outputs[0])
    return None if has_text or answer.keys() & {"tool_calls", "reasoning_content"} else "no_answer"


def token_flaw(attributes: Mapping[str, Any]) -> TokenFlaw | None:
    """What a call lacks to be trained by its tokens, in its own span or in the raw answer that OpenInference records."""
    answer = attributes.get("output.value")
    raw = answer if isinstance(answer, str) else ""
    has_ids = keys.COMPLETION_TOKEN_IDS in attributes or ('"token_ids"' in raw and '"prompt_token_ids"' in raw)
    if not has_ids:
        return "no_token_ids"
    return None if keys.COMPLETION_LOGPROBS in attributes or '"logprob"' in raw else "no_logprobs"
