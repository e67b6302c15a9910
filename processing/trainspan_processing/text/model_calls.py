"""What one recorded model call is good for, by the attributes of its span alone."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from trainspan_processing.text.chat_messages import chat_messages, only_text
from trainspan_processing.text.dialects import LANGFUSE_CALL, LANGFUSE_KIND, Message, messages_of, parsed
from trainspan_schemas.telemetry import keys

__all__ = ["TextFlaw", "TokenFlaw", "is_model_call", "is_whole", "messages_flaw", "model_of", "text_flaw", "token_flaw"]

TextFlaw = Literal["failed", "no_messages", "no_answer", "cut_off", "other_parts"]
TokenFlaw = Literal["no_token_ids", "no_logprobs"]

_OPERATIONS: Final = (keys.OPERATION_CHAT, keys.OPERATION_TEXT_COMPLETION, "generate_content")
_MODELS: Final = (keys.GEN_AI_REQUEST_MODEL, "llm.model_name", "langfuse.observation.model.name")
_OF_LANGFUSE: Final = ("model.parameters", "usage_details")
_CUT_OFF: Final = {"length", "max_tokens", "content_filter", "error", "abort", "cancelled", "incomplete"}


def is_model_call(attributes: Mapping[str, Any]) -> bool:
    """Whether the span is of a model call, in any dialect."""
    return (
        attributes.get(keys.GEN_AI_OPERATION) in _OPERATIONS
        or attributes.get("llm.request.type") in ("chat", "completion")
        or attributes.get("openinference.span.kind") == "LLM"
        or attributes.get(LANGFUSE_KIND) == LANGFUSE_CALL
    )


def model_of(attributes: Mapping[str, Any]) -> str | None:
    """The name of the model that was asked."""
    return next((name for key in _MODELS if isinstance(name := attributes.get(key), str) and name), None)


def is_whole(attributes: Mapping[str, Any], outputs: list[Message]) -> bool:
    """Whether the answer ended by itself; a truncated answer would teach the model to stop in the middle."""
    reasons = attributes.get(keys.GEN_AI_FINISH_REASONS) or [
        attributes.get("llm.finish_reason") or outputs[0].get("finish_reason")
    ]
    if reasons == [None]:
        return not _is_used_up(attributes)
    return not (set(map(str, reasons)) & _CUT_OFF if isinstance(reasons, list) else str(reasons) in _CUT_OFF)


def _is_used_up(attributes: Mapping[str, Any]) -> bool:
    """Whether the answer has all the tokens that the request allowed: what tells of its end where no reason is recorded."""
    parameters, usage = (parsed(attributes.get(f"langfuse.observation.{name}")) for name in _OF_LANGFUSE)
    limit = _number(attributes, keys.GEN_AI_MAX_TOKENS) or _number(parameters, "max_completion_tokens", "max_tokens")
    used = _number(attributes, keys.GEN_AI_OUTPUT_TOKENS) or _number(
        usage, "output", "completion_tokens", "output_tokens"
    )
    return limit is not None and used is not None and used >= limit


def _number(record: Any, *names: str) -> float | None:
    values = (record.get(name) for name in names) if isinstance(record, Mapping) else ()
    return next(
        (float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)), None
    )


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


def messages_flaw(inputs: list[Message], outputs: list[Message]) -> Literal["no_answer", "other_parts"] | None:
    """Why recorded messages are no example: they have parts that are no text, or the answer has neither text nor calls."""
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
