"""Calls whose requests offer tools that their prompts lack."""

from collections.abc import Mapping
from typing import Any

from trainspan_processing.reasons.missing_calls import Lack
from trainspan_processing.text.chat_messages import tools_of
from trainspan_schemas.telemetry.tools import TOOLS_ADVICE, lacks_tools, tools_left_out

__all__ = ["left_out_tools"]


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
