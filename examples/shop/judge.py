"""The judges of the shopping agent: exact answer, and a coin for the control run."""

import hashlib
from typing import Any


def exact(task: dict[str, Any], result: Any) -> float:
    """Returns 1.0 if the agent returned the right number, otherwise 0.0."""
    return float(result.value == task["answer"])


def coin(task: dict[str, Any], result: Any) -> float:
    """Returns a random reward for training, 1.0 for half of all rollouts; for validation the real one."""
    if task.get("split") == "val":
        return exact(task, result)
    return float(hashlib.sha256(result.rollout_id.encode()).digest()[0] & 1)
