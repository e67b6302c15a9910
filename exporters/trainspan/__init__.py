"""The agent's side of trainspan: optional calls for agents that need more than `opentelemetry-instrument` alone.

with trainspan.rollout(task_id="task-1") as r:
    answer = agent(question)
    r.reward(1.0)

Internals: `_environment` and `_hook` run before the agent, `_rollout_block` and `_rollout/` track the current rollout,
`_calls/` handles requests to the policy server, `_process/` sends all spans before a process ends, and `_worker` runs
functions for a runner.
"""

from trainspan._rollout.reward import reward
from trainspan._rollout_block import Rollout, rollout

__all__ = ["Rollout", "reward", "rollout"]
