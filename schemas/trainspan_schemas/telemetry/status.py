"""Fixed names: statuses of rollouts, kinds of calls, and reasons to drop calls."""

from typing import Final, Literal, cast, get_args

from trainspan_schemas.errors import UsageError

__all__ = [
    "DROP_REASONS",
    "KIND_PREFIX",
    "REQUESTED_KINDS",
    "ROLLOUT_STATUSES",
    "CallKind",
    "DropReason",
    "RolloutStatus",
    "kind_named",
    "without_detail",
]

RolloutStatus = Literal[
    "ok", "agent_error", "context_overflow", "timeout", "cancelled", "infra_error", "judge_error", "diverged"
]
ROLLOUT_STATUSES: Final[tuple[str, ...]] = get_args(RolloutStatus)

CallKind = Literal["main", "sub_agent", "summary", "title", "other"]
REQUESTED_KINDS: Final[tuple[CallKind, ...]] = ("summary", "title")
"""Those that a request alone shows (agents/call_kinds.py)."""
KIND_PREFIX: Final = "kind:"
"""Where a setting names agents, this and a kind names all calls of that kind."""

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


def kind_named(name: str) -> CallKind | None:
    """The kind in `kind:NAME`; None for the name of an agent. Raises UsageError for an unknown kind."""
    if not name.startswith(KIND_PREFIX):
        return None
    kind = name.removeprefix(KIND_PREFIX)
    if kind not in get_args(CallKind):
        raise UsageError(f"unknown kind in {name!r}; kinds are {', '.join(get_args(CallKind))}")
    return cast("CallKind", kind)


def without_detail(reason: str) -> str:
    """The reason without a detail after a colon: `constrained` for `constrained:beam_search`."""
    return reason.partition(":")[0]
