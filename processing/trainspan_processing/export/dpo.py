"""Preference pairs from the point where the best and the worst rollout of a group diverge. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainspan_processing.export.candidates import CallsOf, Examples, RewardedRollout, kept_calls, offered_tools
from trainspan_processing.export.conversations import RecordedCall
from trainspan_processing.text.chat_messages import same_messages

__all__ = ["preference_pairs"]

RolloutCalls = Sequence[tuple[RewardedRollout, Sequence[RecordedCall]]]


def preference_pairs(
    groups: Mapping[str, Sequence[RewardedRollout]],
    calls_of: CallsOf,
    *,
    min_reward: float | None,
    agents: frozenset[str],
) -> Examples:
    """One pair per group: {"prompt", "chosen", "rejected"} from the point where its best and its worst rollout diverge.

    That is the first call with the same prompt and different answers. Reasons that count groups: `one_rollout`,
    `equal_rewards`, `below_min_reward` (of the best), `no_text`, `no_common_prompt`, `same_answers`. Reasons that count
    calls: `cut_off`, `not_selected`, `other_parts` (images, files), `other_tokens` (see RecordedCall).
    """
    examples = Examples(groups=len(groups))
    for candidates in groups.values():
        rewards = [candidate.reward for candidate in candidates]
        if len(candidates) < 2 or min(rewards) == max(rewards):
            examples.skipped["one_rollout" if len(candidates) < 2 else "equal_rewards"] += 1
            continue
        if min_reward is not None and max(rewards) < min_reward:
            examples.skipped["below_min_reward"] += 1
            continue
        ends = [
            [
                (candidate, kept_calls(calls_of(candidate.key), agents, examples.skipped))
                for candidate in candidates
                if candidate.reward == end
            ]
            for end in (max(rewards), min(rewards))
        ]
        reason = _add_first_pair(examples, *ends)
        if reason is None:
            examples.groups_used += 1
        else:
            examples.skipped[reason] += 1
    return examples


def _add_first_pair(examples: Examples, best: RolloutCalls, worst: RolloutCalls) -> str | None:
    """Adds a pair from the first two rollouts that diverge. Returns None, or the reason why there is no pair."""
    reason = (
        "no_text" if not any(calls for _, calls in best) or not any(calls for _, calls in worst) else "no_common_prompt"
    )
    for good, good_calls in best:
        for bad, bad_calls in worst:
            asked: dict[tuple[str | None, str], list[RecordedCall]] = {}
            for call in bad_calls:
                asked.setdefault((call.agent, _same(call.prompt)), []).append(call)
            for call in good_calls:
                for other in asked.get((call.agent, _same(call.prompt)), ()):
                    if _same(call.answer) == _same(other.answer):
                        reason = "same_answers"
                        continue
                    row = {
                        "prompt": call.prompt,
                        "chosen": call.answer,
                        "rejected": other.answer,
                        **offered_tools(call),
                    }
                    examples.rows.append(row)
                    examples.sources.append(
                        {
                            "chosen": {"rollout_id": good.rollout_id, "attempt": good.attempt, "reward": good.reward},
                            "rejected": {"rollout_id": bad.rollout_id, "attempt": bad.attempt, "reward": bad.reward},
                        }
                    )
                    return None
    return reason


def _same(text: Any) -> str:
    return text if isinstance(text, str) else same_messages(text)
