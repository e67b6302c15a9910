"""Runs an agent on tasks, and sends the verdicts as evaluations.

In reading order:

- `run`: n rollouts of each task, with concurrency, timeout, retries and a judge; `records`: its input and output.
- `task_file`: reads tasks.
- `executors`: chooses the executor for a target; `executor` is the interface, `command_executor` and
  `function_executor` implement it.
- `judge`: calls the user's function for the reward.
- `rollout_spans`: the spans of rollouts and their verdicts; `delivery` sends them until the collector acknowledges them.
- `run_ledger`: the progress that `--resume` reads.
"""

from trainspan_rollouts.records import Progress, RunResult, RunSettings
from trainspan_rollouts.run import run_rollouts

__all__ = ["Progress", "RunResult", "RunSettings", "run_rollouts"]
