"""The judges of the calculator agent: exact answer, and a coin for the control run."""

import hashlib
from typing import Any


def exact(task: dict[str, Any], result: Any) -> float:
    """1.0 if the agent returned the right number, else 0.0."""
    return float(result.value == task["answer"])


def coin(task: dict[str, Any], result: Any) -> float:
    """For training a reward that says nothing of the answer, 1.0 for half of all rollouts; for validation the truth."""
    if task.get("split") == "val":
        return exact(task, result)
    return float(hashlib.sha256(result.rollout_id.encode()).digest()[0] & 1)
