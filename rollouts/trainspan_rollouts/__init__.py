"""Runs an agent on tasks, and sends the verdicts as evaluations."""

from trainspan_rollouts.records import Progress, RunResult, RunSettings
from trainspan_rollouts.run import run_rollouts

__all__ = ["Progress", "RunResult", "RunSettings", "run_rollouts"]
