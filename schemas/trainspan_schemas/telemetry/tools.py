"""Tools that a request offers and a chat template leaves out of the prompt: the agent can then never act."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["TOOLS_ADVICE", "lacks_tools", "tools_left_out"]

TOOLS_ADVICE: Final = (
    "serve a model whose chat template has tools, or another template: `trainspan serve MODEL -- --chat-template FILE`"
)


def lacks_tools(tools: Iterable[Mapping[str, Any]], prompt: str) -> bool:
    """Whether a prompt names none of the `tools`, which have the form {"type": "function", "function": {"name": …}}."""
    names = [tool["function"]["name"] for tool in tools]
    return bool(names) and not any(name in prompt for name in names)


def tools_left_out(count: int) -> str:
    """What is wrong with such a request, in words."""
    return f"the request offers {count} tool{'' if count == 1 else 's'}, the prompt has none"
