"""The judge of the agent's answers."""

from typing import Any


def exact(task: dict[str, Any], result: Any) -> float:
    """Returns 1.0 if the agent returned the answer, otherwise 0.0."""
    return float(result.value == task["answer"])
