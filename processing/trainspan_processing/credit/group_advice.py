"""Advice if a baseline has nothing to compare with."""

from collections.abc import Collection

from trainspan_processing.credit.baselines import WITH_GROUPS, WITH_HISTORY

__all__ = ["group_advice"]


def group_advice(baselines: Collection[str], *, has_tasks: bool) -> dict[str, str]:
    """Advice by reason if there is nothing to compare with and the usual advice does not fit the baselines or rollouts."""
    if all(baseline in WITH_HISTORY for baseline in baselines):
        return {
            "singleton_group": "the first rollout of a run has no earlier one to compare with: run the agent again, then build "
            "another dataset with the new rollouts"
        }
    if not has_tasks and all(baseline in WITH_GROUPS for baseline in baselines):
        return {
            "singleton_group": "no rollout names its task, so only rollouts with the same first prompt are compared: leave "
            "--baseline out (it is then running), or name tasks (`trainspan rollout --tasks FILE --n 8`, "
            "`trainspan.rollout(task_id=…)`)"
        }
    return {}
