"""The agent's side of trainspan: optional calls for agents that want more than `opentelemetry-instrument` alone gives.

with trainspan.rollout(task_id="task-1") as r:
    answer = agent(question)
    r.reward(1.0)

Inside: `_environment` and `_hook` run before the agent, `_rollout_block` and `_rollout/` say which rollout code runs in, `_calls/` goes
with requests to the policy server, `_process/` ends a process with its spans sent, and `_worker` runs functions for a runner.
"""

from trainspan._rollout.reward import reward
from trainspan._rollout_block import Rollout, rollout

__all__ = ["Rollout", "reward", "rollout"]
