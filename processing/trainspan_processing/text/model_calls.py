"""What one recorded model call is good for, by the attributes of its span alone."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from trainspan_processing.text.chat_messages import only_text
from trainspan_processing.text.dialects import Message, messages_of
from trainspan_schemas.telemetry import keys

__all__ = ["TextFlaw", "TokenFlaw", "is_model_call", "is_whole", "text_flaw", "token_flaw"]

TextFlaw = Literal["failed", "no_messages", "no_answer", "cut_off", "other_parts"]
TokenFlaw = Literal["no_token_ids", "no_logprobs"]

_OPERATIONS: Final = (keys.OPERATION_CHAT, keys.OPERATION_TEXT_COMPLETION, "generate_content")
_CUT_OFF: Final = {"length", "max_tokens", "content_filter", "error", "abort", "cancelled", "incomplete"}


def is_model_call(attributes: Mapping[str, Any]) -> bool:
    """Whether the span is of a model call, in any dialect."""
    return (
        attributes.get(keys.GEN_AI_OPERATION) in _OPERATIONS
        or attributes.get("llm.request.type") in ("chat", "completion")
        or attributes.get("openinference.span.kind") == "LLM"
    )


def is_whole(attributes: Mapping[str, Any], outputs: list[Message]) -> bool:
    """Whether the answer ended by itself; a truncated answer would teach the model to stop in the middle."""
    reasons = attributes.get(keys.GEN_AI_FINISH_REASONS) or [outputs[0].get("finish_reason")]
    return not (set(map(str, reasons)) & _CUT_OFF if isinstance(reasons, list) else str(reasons) in _CUT_OFF)


def text_flaw(attributes: Mapping[str, Any], *, failed: bool) -> TextFlaw | None:
    """Why the messages of a call are no example of an answer; None if they are."""
    if failed:
        return "failed"
    inputs, outputs = messages_of(attributes)
    if not inputs:
        return "no_messages"
    if not outputs:
        return "no_answer"
    if not is_whole(attributes, outputs):
        return "cut_off"
    return None if only_text([*inputs, *outputs[:1]]) else "other_parts"


def token_flaw(attributes: Mapping[str, Any]) -> TokenFlaw | None:
    """What a call lacks to be trained by its tokens, in its own span or in the raw answer that OpenInference records."""
    answer = attributes.get("output.value")
    raw = answer if isinstance(answer, str) else ""
    has_ids = keys.COMPLETION_TOKEN_IDS in attributes or ('"token_ids"' in raw and '"prompt_token_ids"' in raw)
    if not has_ids:
        return "no_token_ids"
    return None if keys.COMPLETION_LOGPROBS in attributes or '"logprob"' in raw else "no_logprobs"
