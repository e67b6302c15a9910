"""The messages of a Langfuse generation, whose input and output are as its program or an integration passed them.

Read are OpenAI's chat messages and Responses items, what Langfuse's handler of LangChain writes, and texts. An item of a list that is
none of these stays, as a message with an unknown part: it is no example, and is counted.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from trainspan_processing.text.json_text import begins_like_json, parsed
from trainspan_schemas.files.durable import JsonObject

__all__ = ["LANGFUSE_CALL", "LANGFUSE_KIND", "langfuse_messages", "langfuse_tools"]

LANGFUSE_KIND: Final = "langfuse.observation.type"
LANGFUSE_CALL: Final = "generation"
_ROLES: Final = {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}
_MESSAGE_MEMBERS: Final = ("content", "tool_calls", "function_call")
_ITEMS: Final = ("message", "reasoning", "function_call", "function_call_output")
"""Types of the items of OpenAI's Responses that are read."""
_UNKNOWN_PARTS: Final[list[JsonObject]] = [{"type": "unknown"}]
"""Those of a message that stands for an item that is none."""


def langfuse_messages(attributes: Mapping[str, Any], side: Literal["input", "output"]) -> list[JsonObject]:
    """The messages of one side, each {"role", "content" or "parts", …}; empty if the span is no generation or has none.

    An output has a message for each choice. An object without messages is no input; as an output it is the text of the answer.
    JSON that a length limit has cut is no message.
    """
    text = attributes.get(f"langfuse.observation.{side}")
    if (
        attributes.get(LANGFUSE_KIND) != LANGFUSE_CALL
        or not isinstance(text, str)
        or not text
        or text.strip() == "null"
    ):
        return []
    value = parsed(text)
    if side == "input":
        if isinstance(value, (dict, list)):
            return [message for message in _turns(_asked(value)) if _schema(message) is None]
        return [] if begins_like_json(text) else [{"role": "user", "content": text}]
    if isinstance(value, (dict, list)):
        answers = _answers(value, text)
    else:
        answers = [] if begins_like_json(text) else [{"role": "assistant", "content": text}]
    return [_with_reason(attributes, message) for message in answers]


def langfuse_tools(attributes: Mapping[str, Any]) -> list[Any]:
    """The tools that a generation's input offers, as recorded."""
    if attributes.get(LANGFUSE_KIND) != LANGFUSE_CALL:
        return []
    value = parsed(attributes.get("langfuse.observation.input"))
    if isinstance(value, dict):
        tools = value.get("tools") or value.get("functions")
        return tools if isinstance(tools, list) else []
    items = value if isinstance(value, list) else []
    return [schema for item in items if isinstance(item, dict) and (schema := _schema(item)) is not None]


def _asked(value: JsonObject | list[Any]) -> list[Any]:
    """The items of an input: of a list, of a request to OpenAI or Anthropic, or the one message that it is."""
    if isinstance(value, list):
        return value[0] if len(value) == 1 and isinstance(value[0], list) else value
    if isinstance(value.get("role"), str):
        return [value]
    items = value.get("messages", value.get("input"))
    if isinstance(items, str) and items:
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        return []
    system = value.get("system") or value.get("instructions")
    return [{"role": "system", "content": system}, *items] if system else items


def _answers(value: JsonObject | list[Any], text: str) -> list[JsonObject]:
    if isinstance(value, list):
        return _choices_or_last(value)
    if not value:
        return []
    for member in ("messages", "output"):
        if isinstance(items := value.get(member), list):
            return _choices_or_last(items)
    if isinstance(choices := value.get("choices"), list):
        return [_choice(choice) for choice in choices]
    if isinstance(value.get("role"), str) or value.get("type") in _ITEMS:
        return _choices_or_last([value])
    if any(member in value for member in _MESSAGE_MEMBERS):
        return _turns([{**value, "role": "assistant"}])
    return [{"role": "assistant", "content": text}]


def _choices_or_last(items: Sequence[Any]) -> list[JsonObject]:
    """The answers in a list: choices, or the last answer of a conversation. What is not understood is the only one."""
    messages = _turns(items)
    if any(message.get("parts") == _UNKNOWN_PARTS for message in messages):
        return [{"role": "assistant", "parts": _UNKNOWN_PARTS}]
    answers = [message for message in messages if message["role"] == "assistant"]
    return answers if len(answers) == len(messages) else answers[-1:]


def _choice(choice: Any) -> JsonObject:
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return {"role": "assistant", "parts": _UNKNOWN_PARTS}
    (answer,) = _turns([{**message, "role": "assistant"}])
    return {**answer, "finish_reason": choice.get("finish_reason")}


def _turns(items: Sequence[Any]) -> list[JsonObject]:
    """A message for each item; the items that one response of OpenAI consists of are one message."""
    messages: list[JsonObject] = []
    is_open = False
    for item in items:
        message, is_part = _message(item)
        if is_part and is_open:
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
        # a function's call also belongs to a message without a type, which a program wrote itself
        is_open = message["role"] == "assistant" and "parts" not in message
    return messages


def _message(item: Any) -> tuple[JsonObject, bool]:
    """(the item as a message, whether it is of the same response as an answer's item before it)."""
    kind = item.get("type") if isinstance(item, dict) else None
    ended = {"finish_reason": "incomplete"} if kind and item.get("status") == "incomplete" else {}
    if kind == "function_call" and isinstance(item.get("name"), str):
        call = {"id": item.get("call_id"), "name": item["name"], "arguments": item.get("arguments")}
        return {"role": "assistant", "content": None, "tool_calls": [call], **ended}, True
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _result(item.get("output"))}, False
    if kind == "reasoning" and "role" not in item:
        return {"role": "assistant", "content": None, "reasoning_content": _thoughts(item), **ended}, True
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        return {"role": "user", "parts": _UNKNOWN_PARTS}, False
    role = _ROLES.get(item["role"], item["role"])
    message = {**item, "role": role, **ended}
    if isinstance(call := message.pop("function_call", None), dict) and not message.get("tool_calls"):
        message["tool_calls"] = [{"function": call}]
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        message["content"] = _result(message.get("content"))
    return message, kind == "message" and role == "assistant"


def _joined(first: JsonObject, more: JsonObject) -> JsonObject:
    """One message of two items of a response; texts are joined by line feeds."""
    message = {**first, **{name: value for name, value in more.items() if value is not None}}
    for name in ("content", "tool_calls"):
        values = [part[name] for part in (first, more) if part.get(name) is not None]
        if len(values) == 2:
            message[name] = [item for value in values for item in _items(value, is_text=name == "content")]
    thoughts = [str(part["reasoning_content"]) for part in (first, more) if part.get("reasoning_content")]
    return {**message, "reasoning_content": "\n".join(thoughts)} if thoughts else message


def _items(value: Any, *, is_text: bool) -> list[Any]:
    return value if isinstance(value, list) else [{"type": "text", "text": value} if is_text else value]


def _thoughts(item: JsonObject) -> str | None:
    """The thoughts as far as they are readable, else their summary."""
    for member in ("content", "summary"):
        parts = item.get(member)
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if texts:
            return "\n".join(str(text) for text in texts)
    return None


def _result(value: Any) -> Any:
    """A tool's result as its content: a text or content parts; what else it is as JSON text."""
    is_parts = isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value)
    return value if isinstance(value, str) or value is None or is_parts else json.dumps(value, ensure_ascii=False)


def _schema(message: JsonObject) -> JsonObject | None:
    """The tool that a message of Langfuse's handler of LangChain offers: it has the role of a result, but answers no call."""
    content = message.get("content")
    if message.get("role") != "tool" or message.get("tool_call_id") is not None or not isinstance(content, dict):
        return None
    is_schema = isinstance(content.get("function"), dict) or (
        isinstance(content.get("name"), str) and bool(content.keys() & {"parameters", "input_schema", "description"})
    )
    return content if is_schema else None


def _with_reason(attributes: Mapping[str, Any], message: JsonObject) -> JsonObject:
    """With the finish reason of a streamed answer, which Langfuse has in the metadata, unless the message has its own."""
    reason = attributes.get("langfuse.observation.metadata.finish_reason")
    if message.get("finish_reason") is not None or not isinstance(reason, str):
        return message
    text = parsed(reason)
    return {**message, "finish_reason": text if isinstance(text, str) else reason}
