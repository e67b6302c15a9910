"""Messages in the form of chat templates: {"role", "content", "tool_calls"?, "name"?, …}, as TRL documents it."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainspan_processing.text.dialects import Message
from trainspan_processing.text.json_text import parsed
from trainspan_processing.text.langfuse import langfuse_tools
from trainspan_schemas.files.durable import JsonObject

__all__ = ["ChatMessage", "chat_messages", "has_whole_parts", "only_text", "same_messages", "tools_of"]

ChatMessage = JsonObject

_CALL_KEY: Final = re.compile(r"tool_calls\.(\d{1,6})\.(?:tool_call\.)?(?:function\.)?(id|name|arguments)")
_SCHEMA_KEY: Final = re.compile(r"llm\.tools\.(\d{1,6})\.tool\.json_schema")
_FUNCTION_KEY: Final = re.compile(r"llm\.request\.functions\.(\d{1,6})\.(name|description|parameters)")
_TOLD_THOUGHTS: Final = ("reasoning", "thinking")
_THOUGHTS: Final = (*_TOLD_THOUGHTS, "redacted_thinking")
_KNOWN_PARTS: Final = ("text", "tool_call", *_THOUGHTS)
_FLAT_PART: Final = re.compile(r"contents\.\d{1,3}\.message_content\.(?!text$|type$).+")


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Chat messages from a client's recorded messages, in any dialect.

    Arguments of tool calls become objects if they are JSON objects, else they are text. Parts that no chat template accepts (images)
    are left out.
    """
    return [_converted(message) for message in messages]


def only_text(messages: Sequence[Message]) -> bool:
    """Whether `chat_messages` leaves out nothing that a model sees: no image, no file, no other part that is no text."""
    return not any(map(_has_other_part, messages))


def has_whole_parts(message: Message) -> bool:
    """Whether each text and thought of the message has its content: a client that may not record content leaves it out."""
    parts = (part for part in _list(message.get("parts")) if isinstance(part, dict))
    return all(_recorded(part) is not None for part in parts if part.get("type") in ("text", *_TOLD_THOUGHTS))


def _has_other_part(message: Message) -> bool:
    content, parts, calls = (message.get(name) for name in ("content", "parts", "tool_calls"))
    return (
        any(not isinstance(part, dict) or part.get("type") not in _KNOWN_PARTS for part in _list(parts))
        or not all(map(_is_tool_call, _list(calls)))
        or bool(message.get("refusal") or message.get("invalid_tool_calls"))
        or isinstance(content, dict)
        or (isinstance(content, list) and any(not _is_text(part) for part in content))
        or any(_FLAT_PART.fullmatch(key) for key in message)
    )


def _list(value: Any) -> list[Any]:
    """A member that should be a list; another value is as one item of no known kind, and nothing is no item."""
    return value if isinstance(value, list) else [None] if value else []


def _is_tool_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function") or {}, dict)


def same_messages(messages: Sequence[ChatMessage]) -> str:
    """A text that is equal for equal conversations; ids of tool calls, which servers choose at random, are ignored.

    An argument of a tool that is called `id` is not.
    """
    return json.dumps([_without_ids(message) for message in messages], sort_keys=True, ensure_ascii=False)


def _without_ids(message: ChatMessage) -> ChatMessage:
    others = {key: value for key, value in message.items() if key not in ("id", "tool_call_id", "tool_calls")}
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls") or ()]
    return {**others, "tool_calls": calls} if calls else others


def tools_of(attributes: Mapping[str, Any]) -> list[JsonObject]:
    """The tools that the request offered, as JSON schemas; empty if none was recorded."""
    stated = parsed(attributes.get("gen_ai.tool.definitions")) or langfuse_tools(attributes)
    if isinstance(stated, list) and stated:
        return [_tool(tool) for tool in stated if isinstance(tool, dict)]
    schemas: dict[int, Any] = {}
    functions: dict[int, JsonObject] = {}
    for key, value in attributes.items():
        if match := _SCHEMA_KEY.fullmatch(key):
            schemas[int(match[1])] = parsed(value)
        elif match := _FUNCTION_KEY.fullmatch(key):
            functions.setdefault(int(match[1]), {})[match[2]] = parsed(value) if match[2] == "parameters" else value
    tools = schemas or functions
    return [_tool(tools[index]) for index in sorted(tools) if isinstance(tools[index], dict)]


def _tool(tool: JsonObject) -> JsonObject:
    if isinstance(tool.get("function"), dict):
        return {"type": "function", "function": tool["function"]}
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _converted(message: Message) -> ChatMessage:
    role = str(message.get("role") or "user")
    parts = [part for part in _list(message.get("parts")) if isinstance(part, dict)]
    chat_message: ChatMessage = {"role": role, "content": _content(message.get("content"))}
    content = message.get("content")
    listed = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    told = (part for part in (*parts, *listed) if part.get("type") in _TOLD_THOUGHTS)
    if thoughts := [text for part in told if (text := _recorded(part)) is not None]:
        chat_message["reasoning_content"] = "".join(thoughts)
    elif isinstance(text := message.get("reasoning_content") or message.get("reasoning"), str):
        chat_message["reasoning_content"] = text
    if calls := _tool_calls(message, parts):
        chat_message["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            chat_message[key] = message[key]
    return chat_message


def _content(content: Any) -> str:
    """The content as text; the texts of a list of content parts are joined by line feeds, as a policy server joins them."""
    if isinstance(content, list):
        texts = (_text_of(part) for part in content if isinstance(part, dict))
        return "\n".join(text for text in texts if text is not None)
    return "" if content is None else str(content)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") in _THOUGHTS or _text_of(part) is not None)


def _text_of(part: Mapping[str, Any]) -> str | None:
    """The text of a part of type `text`, `input_text`, `output_text` or none."""
    text = part.get("text", part.get("content"))
    return text if isinstance(text, str) and str(part.get("type", "text")).endswith("text") else None


def _recorded(part: Mapping[str, Any]) -> str | None:
    """The content of a part, also where Anthropic and Bedrock have that of thoughts."""
    texts = (part.get(name) for name in ("content", "thinking", "text"))
    return next((text for text in texts if isinstance(text, str)), None)


def _tool_calls(message: Message, parts: Sequence[JsonObject]) -> list[JsonObject]:
    recorded = [part for part in parts if part.get("type") == "tool_call"]
    if not recorded and isinstance(message.get("tool_calls"), list):
        recorded = [{**call, **(call.get("function") or {})} for call in message["tool_calls"] if _is_tool_call(call)]
    if not recorded:
        flat: dict[int, JsonObject] = {}
        for key, value in message.items():
            if match := _CALL_KEY.fullmatch(key):
                flat.setdefault(int(match[1]), {})[match[2]] = value
        recorded = [flat[index] for index in sorted(flat)]
    calls = []
    for call in recorded:
        function = {"name": str(call.get("name", "")), "arguments": _arguments(call.get("arguments", call.get("args")))}
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**identity, "type": "function", "function": function})
    return calls


def _arguments(value: Any) -> JsonObject | str:
    """An object, or the text that the model wrote; what a client has parsed and is no object is text again."""
    arguments = parsed(value)
    if isinstance(arguments, dict):
        return arguments
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
