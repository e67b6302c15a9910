"""Reads the messages of a client's model call span from its attributes, in the dialect of the span.

Supported: the GenAI conventions (`gen_ai.input.messages`, JSON text or nested value), older traceloop
(`gen_ai.prompt.N.role`) and OpenInference (`llm.input_messages.N.message.role`). Indices sort as numbers.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = ["Message", "messages_of", "plain"]

Message = JsonObject

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
        inputs = [*_messages({"role": "system", "parts": parts}), *inputs]
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
    return [message for item in value if isinstance(item, dict) for message in _messages(item)]


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

    Text parts are joined by line feeds as `content`, as a policy server joins them; the other parts are kept in `parts`.
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
    others = [part for part in rest if not _is(part, "text")]
    message = {**whole, "content": "\n".join(str(part.get("content", "")) for part in rest if _is(part, "text"))}
    return [*tool_results, {**message, "parts": others} if others else message]


def _tool_result(part: JsonObject, message: Message) -> Message:
    result = part.get("response", part.get("result", ""))
    tool_message = {**message, "role": "tool"}
    tool_message["content"] = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    if isinstance(part.get("id"), str):
        tool_message["tool_call_id"] = part["id"]
    if isinstance(part.get("name"), str):
        tool_message["name"] = part["name"]
    return tool_message


def _is(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind


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
        message["content"] = f"{message['content']}\n{value}" if "content" in message else str(value)
    else:
        message[key] = value
