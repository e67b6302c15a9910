"""Messages of a client's model call span, from the attributes of the dialect it is written in.

Understood: the GenAI conventions (`gen_ai.input.messages`, JSON text or nested value), older traceloop
(`gen_ai.prompt.N.role`) and OpenInference (`llm.input_messages.N.message.role`). Indices sort as numbers.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from trainspan_schemas import keys

__all__ = ["Message", "messages_of"]

Message = dict[str, Any]

_FLAT = {
    "input": re.compile(r"(?:gen_ai\.prompt|llm\.input_messages)\.(\d+)\.(?:message\.)?(.+)"),
    "output": re.compile(r"(?:gen_ai\.completion|llm\.output_messages)\.(\d+)\.(?:message\.)?(.+)"),
}


def messages_of(attributes: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """(input messages, output messages), each as {"role", "content", …}; empty where the span holds none."""
    return (
        _structured(attributes.get(keys.GEN_AI_INPUT_MESSAGES)) or _flattened(attributes, "input"),
        _structured(attributes.get(keys.GEN_AI_OUTPUT_MESSAGES)) or _flattened(attributes, "output"),
    )


def _structured(value: Any) -> list[Message]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return []
    if not isinstance(value, list):
        return []
    return [_message(item) for item in value if isinstance(item, dict)]


def _message(item: dict[str, Any]) -> Message:
    """One message; text parts are joined to `content`, the other parts are kept under `parts`."""
    parts = item.get("parts")
    if not isinstance(parts, list):
        return item
    texts = [str(part.get("content", "")) for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    others = [part for part in parts if not (isinstance(part, dict) and part.get("type") == "text")]
    message = {key: value for key, value in item.items() if key != "parts"} | {"content": "".join(texts)}
    return {**message, "parts": others} if others else message


def _flattened(attributes: Mapping[str, Any], side: str) -> list[Message]:
    messages: dict[int, Message] = {}
    for key, value in attributes.items():
        if match := _FLAT[side].fullmatch(key):
            messages.setdefault(int(match[1]), {})[match[2]] = value
    return [messages[index] for index in sorted(messages)]
