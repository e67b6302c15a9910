"""Tasks in, agent executions out, verdicts as evaluations."""

from trainspan_rollouts.run import Progress, RunResult, RunSettings, run_rollouts

__all__ = ["Progress", "RunResult", "RunSettings", "run_rollouts"]
