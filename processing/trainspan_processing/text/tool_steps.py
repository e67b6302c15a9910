"""Reads tool steps from span attributes, in the dialect of the span."""

import json
from collections.abc import Mapping
from typing import Any, Final

from trainspan_schemas.telemetry import keys

__all__ = ["ToolStep", "tool_step"]

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


def _first(attributes: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    value = next((attributes[name] for name in names if attributes.get(name) is not None), None)
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
