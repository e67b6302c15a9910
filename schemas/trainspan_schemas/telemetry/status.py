"""Fixed names: statuses of rollouts, and reasons to drop calls."""

from typing import Final, Literal, get_args

__all__ = ["DROP_REASONS", "ROLLOUT_STATUSES", "DropReason", "RolloutStatus", "without_detail"]

RolloutStatus = Literal[
    "ok", "agent_error", "context_overflow", "timeout", "cancelled", "infra_error", "judge_error", "diverged"
]
ROLLOUT_STATUSES: Final[tuple[str, ...]] = get_args(RolloutStatus)

DropReason = Literal[
    "unfinished",
    "group_unfinished",
    "agent_error",
    "context_overflow",
    "timeout",
    "cancelled",
    "infra_error",
    "judge_error",
    "diverged",
    "id_collision",
    "attempt_conflict",
    "reward_unclear",
    "no_reward",
    "reward_out_of_range",
    "invalid_reward",
    "incomplete",
    "overlong",
    "not_delivered",
    "ended_by_server",
    "superseded_by_retry",
    "deleted",
    "no_token_ids",
    "no_logprobs",
    "invalid_logprobs",
    "greedy",
    "sampling_truncated",
    "unstated_sampling",
    "constrained",
    "mixed_versions",
    "attributes_dropped",
    "redacted",
    "untrusted",
    "untrusted_reward",
    "unsigned",
    "stale",
    "too_long",
    "unused_choice",
    "internal",
    "forced",
    "multimodal",
    "title",
    "not_selected",
    "other_policy",
    "validation",
    "late_after_consumed",
    "zero_spread_group",
    "singleton_group",
    "no_boundary",
    "no_rollout",
]
DROP_REASONS: Final[tuple[str, ...]] = get_args(DropReason)


def without_detail(reason: str) -> str:
    """The reason without a detail after a colon: `constrained` for `constrained:beam_search`."""
    return reason.partition(":")[0]
