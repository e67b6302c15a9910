"""Reads tool steps and offered tools from span attributes, in the dialect of the span."""

import json
from collections.abc import Mapping
from typing import Any, Final

from trainspan_processing.reasons.missing_calls import Lack
from trainspan_processing.text.chat_messages import tools_of
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tools import TOOLS_ADVICE, lacks_tools, tools_left_out

__all__ = ["ToolStep", "left_out_tools", "tool_step"]

ToolStep = tuple[str, str | None, str | None]
"""(name, arguments, result)."""

_NAME: Final = ("gen_ai.tool.name", "tool.name", "traceloop.entity.name")
_ARGUMENTS: Final = ("gen_ai.tool.call.arguments", "traceloop.entity.input", "input.value", "tool.parameters")
_RESULT: Final = ("gen_ai.tool.call.result", "traceloop.entity.output", "output.value")


def tool_step(attributes: Mapping[str, Any], span_name: str) -> ToolStep | None:
    """The tool call in a span; None if the span is not a tool step."""
    is_tool = (
        attributes.get(keys.GEN_AI_OPERATION) == keys.OPERATION_EXECUTE_TOOL
        or attributes.get("traceloop.span.kind") == "tool"
        or attributes.get("openinference.span.kind") == "TOOL"
    )
    if not is_tool:
        return None
    return _first(attributes, _NAME) or span_name, _first(attributes, _ARGUMENTS), _first(attributes, _RESULT)


def left_out_tools(prompts: Mapping[int, tuple[str, Mapping[str, Any]]]) -> list[Lack]:
    """The calls whose requests offer tools that their prompts lack. `prompts`: index of a call → its prompt, its request's attributes."""
    counts: dict[int, int] = {}
    for index, (prompt, attributes) in prompts.items():
        tools = [tool for tool in tools_of(attributes) if isinstance(tool["function"].get("name"), str)]
        if lacks_tools(tools, prompt):
            counts[index] = len(tools)
    if not counts:
        return []
    calls = (
        f"call {min(counts)}"
        if len(counts) == 1
        else f"{len(counts)} of {len(prompts)} calls, first call {min(counts)}"
    )
    return [Lack(f"{tools_left_out(counts[min(counts)])} ({calls})", TOOLS_ADVICE)]


def _first(attributes: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    value = next((attributes[name] for name in names if attributes.get(name) is not None), None)
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
