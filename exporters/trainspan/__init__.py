"""The agent's side of trainspan: optional calls for agents that need more than `opentelemetry-instrument` alone.

with trainspan.rollout(task_id="task-1") as r:
    answer = agent(question)
    r.reward(1.0)

Internals: `_environment` and `_hook` run before the agent, `_rollout_block` and `_rollout/` track the current rollout,
`_calls/` handles requests to the policy server, `_process/` sends all spans before a process ends, and `_worker` runs
functions for a runner. `_child_processes` hands rollouts to other processes. `_pytest` makes each test a rollout, `_jobs`
each job of a Celery or RQ worker. `_instrumentors` quiets other instrumentors, `_releases` handles the releases of
OpenTelemetry, `_guard` contains our own failures, and `_switch` turns everything off.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainspan._rollout.reward import reward
    from trainspan._rollout_block import Rollout, rollout

__all__ = ["Rollout", "reward", "rollout"]


def __getattr__(name: str) -> Any:
    """Imports the rest at the first use: `opentelemetry-instrument` needs only `_environment` before it starts the program."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainspan import _rollout_block
    from trainspan._rollout import reward

    globals().update(Rollout=_rollout_block.Rollout, reward=reward.reward, rollout=_rollout_block.rollout)
    return globals()[name]
