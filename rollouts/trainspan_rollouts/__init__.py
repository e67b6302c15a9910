"""Runs an agent on tasks, and sends the verdicts as evaluations.

In reading order:

- `run`: runs all rollouts; `records`: its settings; `totals` counts.
- `plan`: the rollouts in order; `task_file` and `task_stream` read tasks.
- `attempts`: the attempts at one rollout, from agent to verdict.
- `harnesses/`: connections of coding harnesses, and the folders that each of their attempts has.
- `executors/`: starts the agent. `choice` picks the executor for a target, `executor` is their interface.
- `judges/`: what gives the reward. `choice` finds the judge that a setting names, `judge` calls it.
- `groups`: waits for the rollouts of a group that are judged together.
- `rollout_spans`: the spans of rollouts and their verdicts; `delivery` sends them until the collector acknowledges them.
- `ledger/`: the progress that `--resume` reads.
"""

from trainspan_rollouts.records import RunSettings
from trainspan_rollouts.run import run_rollouts

__all__ = ["RunSettings", "run_rollouts"]
