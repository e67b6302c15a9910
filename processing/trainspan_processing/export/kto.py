"""Examples with a verdict, for unpaired preference learning (KTO, arXiv 2402.01306). Pure functions."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from trainspan_processing.export.candidates import (
    CallsOf,
    Examples,
    RewardedRollout,
    are_equal,
    kept_calls,
    offered_tools,
    reaches,
)

__all__ = ["judged_examples"]


def judged_examples(
    groups: Mapping[str, Sequence[RewardedRollout]],
    calls_of: CallsOf,
    *,
    min_reward: float | None,
    agents: frozenset[str],
) -> Examples:
    """Every whole call of every rollout: {"prompt", "completion", "label"}, and "tools" if any were offered.

    `label` says whether the rollout earned at least `min_reward`; without it, whether it earned more than its group in the mean,
    and groups with equal rewards give none. The reasons `equal_rewards` and `no_text` count groups, `cut_off`, `not_selected`,
    `other_parts` (images, files, refusals), `no_messages` (texts that were not recorded), `no_answer` and `other_tokens` (see
    RecordedCall) count calls.
    """
    examples = Examples(groups=len(groups))
    for candidates in groups.values():
        rewards = [candidate.reward for candidate in candidates]
        if min_reward is None and are_equal(min(rewards), max(rewards)):
            examples.skipped["equal_rewards"] += 1
            continue
        mean, before, has_text = fmean(rewards), len(examples.rows), False
        for candidate in sorted(candidates, key=lambda each: each.key):
            calls = calls_of(candidate.key)
            has_text = has_text or bool(calls)
            reward = candidate.reward
            is_good = (
                reward > mean and not are_equal(reward, mean) if min_reward is None else reaches(reward, min_reward)
            )
            for call in kept_calls(calls, agents, examples.skipped):
                row = {"prompt": call.prompt, "completion": call.answer, "label": is_good}
                examples.rows.append({**row, **offered_tools(call)})
                examples.sources.append(
                    {"rollout_id": candidate.rollout_id, "attempt": candidate.attempt, "reward": candidate.reward}
                )
        if not has_text:
            examples.skipped["no_text"] += 1
        examples.groups_used += len(examples.rows) > before
    return examples
