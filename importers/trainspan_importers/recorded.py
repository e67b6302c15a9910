"""Messages, model calls and tool calls of other tools in the attributes of OpenTelemetry's GenAI conventions.

Spec: https://opentelemetry.io/docs/specs/semconv/gen-ai/ (messages with parts, in `gen_ai.input.messages` and
`gen_ai.output.messages`). Read are the messages of OpenAI (Chat Completions and Responses), Anthropic and LangChain.
"""

import json
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from trainspan_importers.traces import compact_json
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = [
    "Message",
    "call_attributes",
    "message_of",
    "messages_in",
    "number_of",
    "other_fields",
    "outputs_in",
    "text_of",
    "tool_attributes",
    "tools_in",
]

Message = JsonObject
"""{"role", "parts", "name"?, "finish_reason"?}."""

_ROLES: Final = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "function": "tool"}
_MESSAGE_FIELDS: Final = frozenset(
    {"role", "type", "content", "parts", "name", "tool_calls", "function_call", "tool_call_id", "weight", "lc"}
    | {"reasoning", "reasoning_content", "refusal", "status", "object"}
)
"""What a message becomes, or what only says that it is one."""
_HOLDERS: Final = ("messages", "tools", "functions", "choices", "generations", "message", "system", "instructions")
"""Members of a recorded input or output that become messages and tools."""
_TEXTS: Final = ("text", "input_text", "output_text")
_CLASSES: Final = {"HumanMessage": "user", "AIMessage": "assistant", "SystemMessage": "system", "ToolMessage": "tool"}
_PARAMETERS: Final = {
    "temperature": keys.GEN_AI_TEMPERATURE,
    "top_p": keys.GEN_AI_TOP_P,
    "topP": keys.GEN_AI_TOP_P,
    "top_k": keys.GEN_AI_TOP_K,
    "max_tokens": keys.GEN_AI_MAX_TOKENS,
    "maxTokens": keys.GEN_AI_MAX_TOKENS,
    "max_completion_tokens": keys.GEN_AI_MAX_TOKENS,
    "frequency_penalty": keys.GEN_AI_FREQUENCY_PENALTY,
    "presence_penalty": keys.GEN_AI_PRESENCE_PENALTY,
    "seed": keys.GEN_AI_SEED,
}


def message_of(source: Mapping[str, Any]) -> Message:
    """One message: {"role", "parts", "name"?} and what else it has, under its own names."""
    fields = _unwrapped(source)
    role = str(fields.get("role") or fields.get("type") or "user")
    role = _ROLES.get(role, role)
    parts = _tool_result(fields) if role == "tool" else _parts(fields)
    name = fields.get("name")
    name_field = {"name": name} if isinstance(name, str) and role != "tool" else {}
    return {"role": role, "parts": parts, **name_field, **_rest(fields, _MESSAGE_FIELDS)}


def other_fields(value: Any) -> JsonObject:
    """What a recorded input or output has beside its messages and tools."""
    value = _parsed(value)
    return _rest(value, _HOLDERS) if isinstance(value, dict) and not _is_message(value) else {}


def _rest(fields: Mapping[str, Any], used: Container[str]) -> JsonObject:
    return {
        name: value
        for name, value in fields.items()
        if name not in used and value is not False and value not in (None, "", [], {})
    }


def _unwrapped(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a LangChain message, which may be within `kwargs` or `data`; of others the message itself."""
    if isinstance(fields := source.get("kwargs"), dict) and isinstance(source.get("id"), list):
        name = str(source["id"][-1]).removesuffix("Chunk")
        return {**fields, "role": fields.get("role") or _CLASSES.get(name) or fields.get("type") or "user"}
    if isinstance(fields := source.get("data"), dict) and "role" not in source:
        return {**fields, "role": fields.get("role") or source.get("type")}
    return source


def _parts(fields: Mapping[str, Any]) -> list[JsonObject]:
    parts = []
    thoughts = fields.get("reasoning_content") or fields.get("reasoning")
    if isinstance(thoughts, str):
        parts.append({"type": "reasoning", "content": thoughts})
    content = fields.get("parts") if isinstance(fields.get("parts"), list) else fields.get("content")
    if isinstance(content, list):
        parts += [_part(block) for block in content]
    elif content not in (None, ""):
        parts.append({"type": "text", "content": content if isinstance(content, str) else compact_json(content)})
    if isinstance(refusal := fields.get("refusal"), str) and refusal:
        parts.append({"type": "refusal", "content": refusal})
    known = {part.get("id") for part in parts if part.get("type") == "tool_call"}
    parts += [call for call in _tool_calls(fields) if call.get("id") is None or call["id"] not in known]
    return parts or (
        [{"type": "text", "content": ""}] if content == "" else []
    )  # an empty answer is one, no content is none


def _tool_calls(fields: Mapping[str, Any]) -> list[JsonObject]:
    more = fields.get("additional_kwargs")
    calls = fields.get("tool_calls") or (more.get("tool_calls") if isinstance(more, dict) else None)
    if isinstance(calls, list):
        return [_tool_call(call) for call in calls if isinstance(call, dict)]
    if isinstance(call := fields.get("function_call"), dict):
        return [_tool_call(call)]
    return []


def _tool_call(call: Mapping[str, Any]) -> JsonObject:
    function = call.get("function") if isinstance(call.get("function"), dict) else call
    assert isinstance(function, Mapping)
    arguments = function.get("arguments", function.get("args", function.get("input")))
    part = {"type": "tool_call", "name": str(function.get("name") or ""), "arguments": arguments}
    return {**part, "id": call["id"]} if isinstance(call.get("id"), str) else part


def _part(block: Any) -> JsonObject:
    """A content part of any of the vocabularies; an unknown one as it is."""
    if not isinstance(block, dict):
        return {"type": "text", "content": str(block)}
    kind = block.get("type", "text")
    if kind in _TEXTS:
        return {"type": "text", "content": str(block.get("text", block.get("content", "")))}
    if kind in ("thinking", "reasoning"):
        thoughts = str(block.get("thinking") or block.get("content") or block.get("text") or "")
        signature = {"signature": block["signature"]} if block.get("signature") else {}
        return {"type": "reasoning", "content": thoughts, **signature}
    if kind in ("tool_use", "tool_call", "function_call"):
        call_id = block.get("call_id") or block.get("id")
        return _tool_call({**block, "id": call_id})
    if kind in ("tool_result", "tool_call_response"):
        return _response(
            block.get("tool_use_id") or block.get("id"),
            block.get("content", block.get("response")),
            block.get("is_error"),
        )
    if kind == "image_url":
        url = block.get("image_url")
        return {"type": "uri", "modality": "image", "uri": url.get("url") if isinstance(url, dict) else url}
    return dict(block)


def _tool_result(fields: Mapping[str, Any]) -> list[JsonObject]:
    parts = fields.get("parts")
    if isinstance(parts, list):
        return [_part(block) for block in parts]
    part = _response(fields.get("tool_call_id"), fields.get("content"), fields.get("status") == "error" or None)
    return [{**part, "name": fields["name"]} if isinstance(fields.get("name"), str) else part]


def _response(call_id: Any, content: Any, is_error: Any) -> JsonObject:
    part = {"type": "tool_call_response", "response": text_of(content)}
    if isinstance(call_id, str):
        part["id"] = call_id
    return {**part, "is_error": True} if is_error else part


def text_of(content: Any) -> str:
    """The content of a tool's result as one text; texts of parts are joined by line feeds, as a policy server joins them."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in _TEXTS for part in content):
        return "\n".join(str(part.get("text", "")) for part in content)
    return "" if content is None else compact_json(content)


def messages_in(value: Any) -> list[Message]:
    """The messages of a recorded input or output: a message, a list of them (or of lists), an object that holds them, or text."""
    value = _parsed(value)
    if isinstance(value, str):
        return [{"role": "user", "parts": [{"type": "text", "content": value}]}] if value else []
    if isinstance(value, list):
        if value and all(isinstance(item, list) for item in value):
            value = value[0]
        if not any(map(_is_message, value)):
            return []
        items = (item for item in value if not (_is_offered(item) or _is_kind(item, "reasoning")))
        return [message_of(item) if _is_message(item) else _unknown(item) for item in items]
    if isinstance(value, dict):
        if _is_message(value):
            return [message_of(value)]
        inner = value.get("messages", value.get("input"))
        system = value.get("system", value.get("instructions"))
        first = [{"role": "system", "parts": [{"type": "text", "content": text_of(system)}]}] if system else []
        return [*first, *messages_in(inner)] if inner is not None else []
    return []


def outputs_in(value: Any) -> list[Message]:
    """The answers in a recorded output, one per choice, with `finish_reason` where it is known.

    Of a conversation, and of the messages of one response, the last one is the answer. A list with an item that is no message has no
    other answer than that item.
    """
    value = _parsed(value)
    if isinstance(value, str):
        return [{"role": "assistant", "parts": [{"type": "text", "content": value}]}] if value else []
    if not isinstance(value, dict):
        messages = messages_in(value)
        if unknown := [part for message in messages for part in message["parts"] if _is_kind(part, "unknown")]:
            return [{"role": "assistant", "parts": unknown}]
        answers = [message for message in messages if message["role"] == "assistant"]
        is_response = isinstance(value, list) and any(_is_kind(item, "message") for item in value)
        return answers if len(answers) == len(messages) and not is_response else answers[-1:]
    if isinstance(choices := value.get("choices"), list):
        return [answer for choice in choices if (answer := _answer(choice, "message"))]
    generations = value.get("generations")
    if isinstance(generations, list) and generations:
        inner = generations[0] if isinstance(generations[0], list) else generations
        return [answer for generation in inner if (answer := _answer(generation, "message"))]
    if isinstance(content := value.get("output"), (dict, list, str)):
        return outputs_in(content)
    if isinstance(message := value.get("message"), dict):
        return outputs_in(message)
    return [{**message, "role": "assistant"} for message in messages_in(value)][-1:]


def _answer(choice: Any, member: str) -> Message | None:
    if not isinstance(choice, dict):
        return None
    information = choice.get("generation_info")
    reason = choice.get("finish_reason") or (
        information.get("finish_reason") if isinstance(information, dict) else None
    )
    source = choice.get(member)
    if isinstance(source, dict):
        message = message_of(source)
    elif isinstance(choice.get("text"), str):
        message = {"role": "assistant", "parts": [{"type": "text", "content": choice["text"]}]}
    else:
        return None
    return {**message, "role": "assistant", **({"finish_reason": reason} if isinstance(reason, str) else {})}


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    is_langchain = isinstance(value.get("kwargs"), dict) or isinstance(value.get("data"), dict)
    has_role = isinstance(value.get("role"), str) or (value.get("type") in _ROLES or value.get("type") == "system")
    return is_langchain or (has_role and bool({"content", "parts", "tool_calls", "function_call"} & value.keys()))


def _is_kind(value: Any, kind: str) -> bool:
    return isinstance(value, dict) and value.get("type") == kind


def _is_offered(item: Any) -> bool:
    """Whether it is a tool that Langfuse's handler of LangChain lists as a message: a result answers a call, and is a text."""
    if not isinstance(item, dict) or item.get("role") != "tool" or item.get("tool_call_id") is not None:
        return False
    content = item.get("content")
    return isinstance(content, dict) and bool(content.keys() & {"function", "parameters", "input_schema"})


def _unknown(item: Any) -> Message:
    return {"role": "user", "parts": [{"type": "unknown", "item": item}]}


def tools_in(value: Any) -> list[Any]:
    """The tools that a recorded request offered."""
    value = _parsed(value)
    if isinstance(value, list):
        return [item["content"] for item in value if _is_offered(item)]
    if not isinstance(value, dict):
        return []
    tools = value.get("tools")
    if isinstance(tools, list):
        return tools
    functions = value.get("functions")
    if isinstance(functions, list):
        return [{"type": "function", "function": function} for function in functions]
    return []


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def call_attributes(
    *,
    model: Any = None,
    inputs: Sequence[Message] = (),
    outputs: Sequence[Message] = (),
    tools: Sequence[Any] = (),
    agent: Any = None,
    provider: Any = None,
    response_id: Any = None,
    input_tokens: Any = None,
    output_tokens: Any = None,
    cost: Any = None,
    parameters: Mapping[str, Any] | None = None,
) -> JsonObject:
    """The attributes of a model call; what is None or empty is left out, and so are numbers that are none."""
    reasons = [message["finish_reason"] for message in outputs if "finish_reason" in message]
    asked = {field: number_of((parameters or {}).get(field)) for field in _PARAMETERS}
    attributes = {
        keys.GEN_AI_OPERATION: keys.OPERATION_CHAT,
        keys.GEN_AI_REQUEST_MODEL: _text(model),
        keys.GEN_AI_PROVIDER: _text(provider),
        keys.GEN_AI_AGENT_NAME: _text(agent),
        keys.GEN_AI_RESPONSE_ID: _text(response_id),
        keys.GEN_AI_FINISH_REASONS: reasons or None,
        keys.GEN_AI_INPUT_TOKENS: _count(input_tokens),
        keys.GEN_AI_OUTPUT_TOKENS: _count(output_tokens),
        "gen_ai.usage.cost": number_of(cost),
        keys.GEN_AI_TOOL_DEFINITIONS: compact_json(list(tools)) if tools else None,
        keys.GEN_AI_INPUT_MESSAGES: compact_json(list(inputs)) if inputs else None,
        keys.GEN_AI_OUTPUT_MESSAGES: compact_json(list(outputs)) if outputs else None,
        **{_PARAMETERS[field]: value for field, value in asked.items() if value is not None},
    }
    return {name: value for name, value in attributes.items() if value is not None}


def tool_attributes(name: Any, arguments: Any, result: Any, call_id: Any = None) -> JsonObject:
    """The attributes of a tool call; arguments and result as text, JSON if they are no text."""
    attributes = {
        keys.GEN_AI_OPERATION: keys.OPERATION_EXECUTE_TOOL,
        "gen_ai.tool.name": _text(name),
        "gen_ai.tool.call.id": _text(call_id),
        "gen_ai.tool.call.arguments": None if arguments is None else text_of(arguments),
        "gen_ai.tool.call.result": None if result is None else text_of(result),
    }
    return {key: value for key, value in attributes.items() if value is not None}


def number_of(value: Any) -> float | None:
    """The finite number in a value, which may be text or a truth value; None if there is none."""
    if isinstance(value, bool):
        return float(value)
    try:
        number = value if isinstance(value, (int, float)) else _parsed_number(value) if isinstance(value, str) else None
        return number if number is not None and math.isfinite(number) else None
    except (ValueError, OverflowError):  # an integer beyond all floats
        return None


def _parsed_number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def _count(value: Any) -> int | None:
    number = number_of(value)
    return int(number) if number is not None and abs(number) < 2**63 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
