"""Results of `trainspan rollout` without a run."""

from typing import Any

from trainspan_schemas.command_events import RunResult

__all__ = ["run_result"]


def run_result(total: int = 0, **more: Any) -> RunResult:
    """All rollouts ok and without a reward, unless `more` says otherwise."""
    fields: dict[str, Any] = {
        "run_id": "run",
        "round": 1,
        "split": "train",
        "status": {"ok": total},
        "mean_reward": None,
        "rewarded": 0,
        "calls": total,
        "seconds": 1.0,
        "unacknowledged": 0,
    }
    return RunResult(**{**fields, "total": total, **more})
