"""Reads the messages of a client's model call span from its attributes, in the dialect of the span.

Supported: the GenAI conventions (`gen_ai.input.messages`, JSON text or nested value), older traceloop
(`gen_ai.prompt.N.role`) and OpenInference (`llm.input_messages.N.message.role`). Indices sort as numbers.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from trainspan_schemas import keys

__all__ = ["Message", "messages_of", "plain"]

Message = dict[str, Any]

_FLAT = {
    "input": re.compile(r"(?:gen_ai\.prompt|llm\.input_messages)\.(\d+)\.(?:message\.)?(.+)"),
    "output": re.compile(r"(?:gen_ai\.completion|llm\.output_messages)\.(\d+)\.(?:message\.)?(.+)"),
}
_TOOL_CALL = re.compile(r"tool_calls\.(\d{1,3})\.(?:tool_call\.)?(?:function\.)?(\w+)")
_TEXT_PART = re.compile(r"contents\.\d{1,3}\.message_content\.text")


def messages_of(attributes: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """(input messages, output messages), each as {"role", "content", …}; empty if the span has none.

    System instructions recorded separately from the messages come first.
    """
    inputs = _structured(attributes.get(keys.GEN_AI_INPUT_MESSAGES)) or _flattened(attributes, "input")
    if inputs and (parts := _structured(attributes.get(keys.GEN_AI_SYSTEM_INSTRUCTIONS))):
        inputs = [_message({"role": "system", "parts": parts}), *inputs]
    return inputs, _structured(attributes.get(keys.GEN_AI_OUTPUT_MESSAGES)) or _flattened(attributes, "output")


def _structured(value: Any) -> list[Message]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return []
    value = plain(value)
    if not isinstance(value, list):
        return []
    return [_message(item) for item in value if isinstance(item, dict)]


def plain(value: Any) -> Any:
    """The value with the store's key-value lists as dicts."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        pairs = value["kvlist"] if set(value) == {"kvlist"} else value.items()
        return {key: plain(item) for key, item in pairs}
    return value


def _message(item: dict[str, Any]) -> Message:
    """One message; text parts and tool results are joined as `content`, the other parts are kept in `parts`.

    A single tool result sets the message's `tool_call_id`; several stay in the parts, since they answer several calls.
    """
    parts = item.get("parts")
    if not isinstance(parts, list):
        return item
    known = [part for part in parts if isinstance(part, dict)]
    texts = [text for part in known if (text := _text(part)) is not None]
    others = [part for part in parts if not isinstance(part, dict) or _text(part) is None]
    message = {key: value for key, value in item.items() if key != "parts"} | {"content": "".join(texts)}
    results = [part for part in known if part.get("type") == "tool_call_response"]
    if len(results) == 1 and isinstance(results[0].get("id"), str):
        message["tool_call_id"] = results[0]["id"]
    if len(results) > 1:
        others = [*results, *others]
    return {**message, "parts": others} if others else message


def _text(part: dict[str, Any]) -> str | None:
    """The text of a part; None if it has none. A tool's result is its `response` or `result`."""
    if part.get("type") == "text":
        return str(part.get("content", ""))
    if part.get("type") == "tool_call_response":
        result = part.get("response", part.get("result", ""))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return None


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
        calls.extend({} for _ in range(int(match[1]) + 1 - len(calls)))
        calls[int(match[1])][match[2]] = value
    elif _TEXT_PART.fullmatch(key):
        message["content"] = message.get("content", "") + str(value)
    else:
        message[key] = value
