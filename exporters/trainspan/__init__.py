"""The agent's side of trainspan: optional calls for agents that want more than `opentelemetry-instrument` alone gives.

with trainspan.rollout(task_id="task-1") as r:
    answer = agent(question)
    r.reward(1.0)
"""

from trainspan._rollout.reward import reward
from trainspan._rollout_block import Rollout, rollout

__all__ = ["Rollout", "reward", "rollout"]
