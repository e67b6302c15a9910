"""Reads what a tool did from the attributes of a span or log record, in its dialect: frameworks' conventions and harnesses' own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["TOOL_EVENTS", "ToolStep", "tool_step"]

_ID: Final = ("gen_ai.tool.call.id", "ai.toolCall.id", "tool_use_id", "call_id", "tool_call.id")
_NAME: Final = ("gen_ai.tool.name", "tool.name", "ai.toolCall.name", "tool_name", "traceloop.entity.name")
_ARGUMENTS: Final = (
    *("gen_ai.tool.call.arguments", "ai.toolCall.args", "traceloop.entity.input", "input.value", "tool.parameters"),
    *("tool_input", "arguments", "tool_parameters", "langfuse.observation.input"),
)
_RESULT: Final = (
    *("gen_ai.tool.call.result", "ai.toolCall.result", "traceloop.entity.output", "output.value", "output"),
    "langfuse.observation.output",
)
_ERROR: Final = ("error", "error.type", "error_type", "exception.type")
TOOL_EVENTS: Final = ("tool_result", "codex.tool_result")
"""Names of log records of a tool that has ended: Claude Code's and Codex's."""


_MOST_MILLISECONDS: Final = 1e12
"""Some thirty years: what is longer, or no number, is no duration."""


@dataclass(frozen=True, slots=True)
class ToolStep:
    """What one record says; None: nothing."""

    call_id: str | None
    """The id that the model's answer has for the call."""
    name: str | None
    arguments: str | None
    """As text, mostly JSON."""
    result: str | None
    failed: bool | None
    error: str | None
    seconds: float | None
    """Only of log records."""


def tool_step(attributes: Mapping[str, Any]) -> ToolStep:
    """The tool call in a span that is a tool step, or in a log record of TOOL_EVENTS; `failed` only if an attribute says so."""
    success = attributes.get("success")
    failed = None if success is None else str(success).lower() != "true"
    return ToolStep(
        call_id=_first(attributes, _ID),
        name=_first(attributes, _NAME),
        arguments=_first(attributes, _ARGUMENTS),
        result=_first(attributes, _RESULT),
        failed=failed,
        error=_first(attributes, _ERROR),
        seconds=_milliseconds(attributes.get("duration_ms")),
    )


def _milliseconds(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number / 1e3 if 0 <= number <= _MOST_MILLISECONDS else None


def _first(attributes: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    value = next((attributes[name] for name in names if attributes.get(name) is not None), None)
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
