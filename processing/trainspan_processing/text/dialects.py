"""Reads the messages of a client's model call span from its attributes, in the dialect of the span.

Supported: the GenAI conventions (`gen_ai.input.messages`, JSON text or nested value), older traceloop
(`gen_ai.prompt.N.role`), OpenInference (`llm.input_messages.N.message.role`) and Langfuse (`langfuse.observation.input`). Indices
sort as numbers.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from trainspan_processing.text.json_text import parsed
from trainspan_processing.text.langfuse import langfuse_messages
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = ["Message", "messages_of", "plain"]

Message = JsonObject

_FLAT = {
    "input": re.compile(r"(?:gen_ai\.prompt|llm\.input_messages)\.(\d{1,6})\.(?:message\.)?(.+)"),
    "output": re.compile(r"(?:gen_ai\.completion|llm\.output_messages)\.(\d{1,6})\.(?:message\.)?(.+)"),
}
_TOOL_CALL = re.compile(r"tool_calls\.(\d{1,3})\.(?:tool_call\.)?(?:function\.)?(\w+)")
_TEXT_PART = re.compile(r"contents\.\d{1,3}\.message_content\.text")
_CONTENT_PARTS: Final = (
    "text",
    "input_text",
    "output_text",
    "image",
    "image_url",
    "input_image",
    "input_audio",
    "file",
    "input_file",
)
"""Types of OpenAI's and Anthropic's content parts, which a tool's result may consist of."""
_ONLY_RAW: Final = ("content", "reasoning_content", "reasoning", "refusal")
"""Members of an answer's message that OpenInference leaves in the raw response; of the content, an empty one."""


def messages_of(attributes: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """(input messages, output messages), each as {"role", "content", …}; empty if the span has none.

    System instructions recorded separately from the messages come first.
    """
    inputs = _structured(attributes.get(keys.GEN_AI_INPUT_MESSAGES)) or _flattened(attributes, "input")
    if inputs and (parts := _structured(attributes.get(keys.GEN_AI_SYSTEM_INSTRUCTIONS))):
        inputs = [*_messages({"role": "system", "parts": parts}), *inputs]
    outputs = _structured(attributes.get(keys.GEN_AI_OUTPUT_MESSAGES))
    outputs = outputs or _with_raw_members(_flattened(attributes, "output"), attributes.get("output.value"))
    inputs = inputs or [message for item in langfuse_messages(attributes, "input") for message in _messages(item)]
    outputs = outputs or [message for item in langfuse_messages(attributes, "output") for message in _messages(item)]
    return inputs, outputs


def _structured(value: Any) -> list[Message]:
    value = plain(parsed(value))
    if not isinstance(value, list):
        return []
    return [message for item in value if isinstance(item, dict) for message in _messages(item)]


def _with_raw_members(outputs: list[Message], raw: Any) -> list[Message]:
    """OpenInference's answers with what only the raw response has of them: thoughts, an empty text, a refusal, …"""
    response = parsed(raw) if outputs and isinstance(raw, str) and '"choices"' in raw else None
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or len(choices) != len(outputs):
        return outputs
    return [{**_raw_members(choice), **message} for choice, message in zip(choices, outputs, strict=True)]


def _raw_members(choice: Any) -> JsonObject:
    if not isinstance(choice, dict):
        return {}
    inner = choice.get("message")
    message = inner if isinstance(inner, dict) else {}
    members = {**{name: message.get(name) for name in _ONLY_RAW}, "finish_reason": choice.get("finish_reason")}
    return {name: value for name, value in members.items() if isinstance(value, str)}


def plain(value: Any) -> Any:
    """The value with the store's key-value lists as dicts."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        pairs = value["kvlist"] if set(value) == {"kvlist"} else value.items()
        return {key: plain(item) for key, item in pairs}
    return value


def _messages(item: JsonObject) -> list[Message]:
    """One recorded message as messages: each of its tool results alone, with role `tool`, then what else it holds.

    Text parts are joined by line feeds as `content`, as a policy server joins them; the other parts are kept in `parts`, also texts
    whose content was not recorded. A message without any part has no `content`.
    """
    parts = item.get("parts")
    if not isinstance(parts, list):
        return [item]
    results = [part for part in parts if _is(part, "tool_call_response")]
    rest = [part for part in parts if not _is(part, "tool_call_response")]
    whole = {key: value for key, value in item.items() if key != "parts"}
    tool_results = [_tool_result(part, whole) for part in results]
    if results and not rest:
        return tool_results
    others = [part for part in rest if _text(part) is None]
    text = "\n".join(text for part in rest if (text := _text(part)) is not None)
    message = {**whole, "content": text} if rest else whole
    return [*tool_results, {**message, "parts": others} if others else message]


def _tool_result(part: JsonObject, message: Message) -> Message:
    result = part.get("response", part.get("result", ""))
    tool_message = {**message, "role": "tool"}
    is_content = isinstance(result, str) or (isinstance(result, list) and result and all(map(_is_content_part, result)))
    tool_message["content"] = result if is_content else json.dumps(result, ensure_ascii=False)
    if isinstance(part.get("id"), str):
        tool_message["tool_call_id"] = part["id"]
    if isinstance(part.get("name"), str):
        tool_message["name"] = part["name"]
    return tool_message


def _is_content_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _CONTENT_PARTS


def _is(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind


def _text(part: Any) -> str | None:
    """The text of a text part, if it was recorded."""
    text = part.get("content", part.get("text")) if _is(part, "text") else None
    return text if isinstance(text, str) else None


def _flattened(attributes: Mapping[str, Any], side: str) -> list[Message]:
    messages: dict[int, Message] = {}
    for key, value in attributes.items():
        if match := _FLAT[side].fullmatch(key):
            _put(messages.setdefault(int(match[1]), {}), match[2], value)
    return [messages[index] for index in sorted(messages)]


def _put(message: Message, key: str, value: Any) -> None:
    """Adds one flattened attribute to a message; tool calls and parts are numbered."""
    if match := _TOOL_CALL.fullmatch(key):
        calls = message.setdefault("tool_calls", [])
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            return  # the message has a member of this name already, which is no list of calls
        calls.extend({} for _ in range(int(match[1]) + 1 - len(calls)))
        calls[int(match[1])][match[2]] = value
    elif _TEXT_PART.fullmatch(key):
        message["content"] = f"{message['content']}\n{value}" if "content" in message else str(value)
    else:
        message[key] = value
