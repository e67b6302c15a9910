"""Preference pairs from the point where two rollouts diverge: those that a person compared, else a group's best and worst.

Pure functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainspan_processing.export.candidates import (
    CallsOf,
    Examples,
    RewardedRollout,
    are_equal,
    kept_calls,
    offered_tools,
    reaches,
)
from trainspan_processing.export.conversations import RecordedCall
from trainspan_processing.export.labeled_pairs import LabeledPair
from trainspan_processing.text.chat_messages import same_messages

__all__ = ["preference_pairs"]

Key = tuple[str, int]
RolloutCalls = Sequence[tuple[Key, Sequence[RecordedCall]]]


def preference_pairs(
    groups: Mapping[str, Sequence[RewardedRollout]],
    calls_of: CallsOf,
    *,
    min_reward: float | None,
    agents: frozenset[str],
    labeled: Sequence[LabeledPair] = (),
) -> Examples:
    """{"prompt", "chosen", "rejected"} from the point where two rollouts diverge: of each `labeled` pair, whatever its rewards, and of
    the best and the worst rollout of each group without such a pair.

    That is the first call with the same prompt and different answers. Reasons that count groups: `one_rollout`,
    `equal_rewards`, `below_min_reward` (of the best), `no_text`, `no_common_prompt`, `same_answers`. The last three also count
    labeled pairs, with `labeled_` before them. Reasons that count calls: `cut_off`, `not_selected`, `other_parts` (images, files,
    refusals), `no_messages` (texts that were not recorded), `no_answer`, `other_tokens` (see RecordedCall).
    """
    examples = Examples(groups=len(groups))
    rewards_of = {candidate.key: candidate.reward for candidates in groups.values() for candidate in candidates}
    chosen = {key for pair in labeled for key in pair}
    calls = {key: kept_calls(calls_of(key), agents, examples.skipped) for key in sorted(chosen)}
    used: set[Key] = set()
    for good, bad in labeled:
        reason = _add_first_pair(examples, rewards_of, [(good, calls[good])], [(bad, calls[bad])])
        if reason is None:
            used |= {good, bad}
        else:
            examples.skipped[f"labeled_{reason}"] += 1
    for candidates in groups.values():
        if any(candidate.key in chosen for candidate in candidates):
            examples.groups_used += any(candidate.key in used for candidate in candidates)
            continue
        rewards = [candidate.reward for candidate in candidates]
        if len(candidates) < 2 or are_equal(min(rewards), max(rewards)):
            examples.skipped["one_rollout" if len(candidates) < 2 else "equal_rewards"] += 1
            continue
        if min_reward is not None and not reaches(max(rewards), min_reward):
            examples.skipped["below_min_reward"] += 1
            continue
        ends = [
            [
                (candidate.key, kept_calls(calls_of(candidate.key), agents, examples.skipped))
                for candidate in candidates
                if are_equal(candidate.reward, end)
            ]
            for end in (max(rewards), min(rewards))
        ]
        reason = _add_first_pair(examples, rewards_of, *ends)
        if reason is None:
            examples.groups_used += 1
        else:
            examples.skipped[reason] += 1
    return examples


def _add_first_pair(
    examples: Examples, rewards: Mapping[Key, float], best: RolloutCalls, worst: RolloutCalls
) -> str | None:
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
                            "chosen": {"rollout_id": good[0], "attempt": good[1], "reward": rewards.get(good)},
                            "rejected": {"rollout_id": bad[0], "attempt": bad[1], "reward": rewards.get(bad)},
                        }
                    )
                    return None
    return reason


def _same(text: Any) -> str:
    return text if isinstance(text, str) else same_messages(text)
