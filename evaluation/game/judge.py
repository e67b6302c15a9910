"""The judges of the game agent, for its control run. Without a judge, the score that the agent returns is the reward."""

import hashlib
from typing import Any


def score(task: dict[str, Any], result: Any) -> float:
    """Returns the share of the game's points that the agent gained."""
    return float(result.value)


def coin(task: dict[str, Any], result: Any) -> float:
    """Returns a random reward for training, 1.0 for half of all rollouts; for validation the real one."""
    if task.get("split") == "val":
        return score(task, result)
    return float(hashlib.sha256(result.rollout_id.encode()).digest()[0] & 1)
