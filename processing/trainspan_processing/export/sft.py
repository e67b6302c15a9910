"""Supervised examples: the calls of the best rollouts of each group. Pure functions."""

from collections.abc import Mapping, Sequence

from trainspan_processing.export.candidates import (
    CallsOf,
    Examples,
    RewardedRollout,
    kept_calls,
    offered_tools,
    reaches,
)

__all__ = ["supervised_examples"]


def supervised_examples(
    groups: Mapping[str, Sequence[RewardedRollout]],
    calls_of: CallsOf,
    *,
    min_reward: float | None,
    agents: frozenset[str],
    take_all: bool = False,
) -> Examples:
    """Every whole call of the best rollout of each group: {"prompt", "completion"}, and "tools" if any were offered.

    Among equally good rollouts, the one with the fewest calls is used; with `take_all`, each of them and each with a reward of
    at least `min_reward`. The reasons `below_min_reward` and `no_text` count
    groups, `cut_off`, `not_selected`, `other_parts` (images, files, refusals), `no_messages` (texts that were not recorded), `no_answer`
    and `other_tokens` (see RecordedCall) count calls.
    """
    examples = Examples(groups=len(groups))
    for candidates in groups.values():
        highest = max(candidate.reward for candidate in candidates)
        if min_reward is not None and not reaches(highest, min_reward):
            examples.skipped["below_min_reward"] += 1
            continue
        least = highest if min_reward is None or not take_all else min_reward
        best = [candidate for candidate in candidates if reaches(candidate.reward, least)]
        with_calls = [(candidate, calls_of(candidate.key)) for candidate in best]
        recorded = [(candidate, calls) for candidate, calls in with_calls if calls]
        if not recorded:
            examples.skipped["no_text"] += 1
            continue
        recorded.sort(key=lambda pair: (len(pair[1]), pair[0].key))
        before = len(examples.rows)
        for chosen, calls in recorded if take_all else recorded[:1]:
            for call in kept_calls(calls, agents, examples.skipped):
                examples.rows.append({"prompt": call.prompt, "completion": call.answer, **offered_tools(call)})
                examples.sources.append(
                    {"rollout_id": chosen.rollout_id, "attempt": chosen.attempt, "reward": chosen.reward}
                )
        examples.groups_used += len(examples.rows) > before
    return examples
