"""Finds the agent that makes a call on the call stack, for frameworks that keep no current agent.

The nearest frame of a framework's code that holds one of its agents names the calling agent. This works in threads and tasks
without a context, and changes nothing in the framework.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final

from trainspan._guard import guarded

__all__ = ["agent_on_stack"]

_MAX_DEPTH: Final = 500


@dataclass(frozen=True, slots=True)
class _Naming:
    """How a framework's code holds its agents."""

    classes: frozenset[str]
    """Base classes of agents."""
    variables: tuple[str, ...]
    """Local variables that hold the agent, the likeliest first."""
    attribute: str = "name"


_FRAMEWORKS: Final = {
    "ag2": _Naming(frozenset({"Agent"}), ("self",)),
    "agno": _Naming(frozenset({"Agent", "Team"}), ("agent", "team", "self")),
    "crewai": _Naming(frozenset({"BaseAgent"}), ("from_agent", "agent", "self"), "role"),
    "llama_index": _Naming(frozenset({"BaseWorkflowAgent"}), ("self",)),
    "semantic_kernel": _Naming(frozenset({"Agent"}), ("self",)),
    "smolagents": _Naming(frozenset({"MultiStepAgent"}), ("self",)),
}
"""Top package → where its agents are found."""


@guarded
def agent_on_stack() -> str | None:
    """Returns the agent's name, or None if no agent is on the stack or the program did not name it."""
    if sys.modules.keys().isdisjoint(_FRAMEWORKS):
        return None
    for frame in _callers(sys._getframe(1)):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if naming := _FRAMEWORKS.get(package):
            agent = _agent_in(frame, package, naming)
            if agent is not None:
                return _name_of(agent, naming.attribute)
    return None


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MAX_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _agent_in(frame: FrameType, package: str, naming: _Naming) -> object | None:
    code = frame.f_code
    for variable in naming.variables:
        if variable in code.co_varnames or variable in code.co_freevars:
            value = frame.f_locals.get(variable)
            for kind in type(value).__mro__:
                if kind.__name__ in naming.classes and kind.__module__.partition(".")[0] == package:
                    return value
    return None


def _name_of(agent: object, attribute: str) -> str | None:
    """Returns None for a name that the framework generated: Semantic Kernel's differ from process to process."""
    given = getattr(agent, "model_fields_set", None)
    if given is not None and attribute not in given:
        return None
    name = getattr(agent, attribute, None)
    return str(name).strip() or None if name else None
