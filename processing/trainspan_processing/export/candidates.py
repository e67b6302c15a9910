"""Examples from rollouts that were compared: the best of each group, and pairs of its best and worst. Pure functions."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainspan_processing.export.conversations import Speech
from trainspan_processing.text.chat_messages import same_messages

__all__ = ["Candidate", "Examples", "preference_pairs", "supervised_examples"]

Said = Callable[[tuple[str, int]], Sequence[Speech]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rewarded rollout."""

    rollout_id: str
    attempt: int
    group: str
    reward: float

    @property
    def key(self) -> tuple[str, int]:
        return self.rollout_id, self.attempt


@dataclass(slots=True)
class Examples:
    """What came of the groups."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """As TRL takes them."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Which rollouts each row is from."""
    groups: int = 0
    groups_used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason → groups or calls that gave no row."""


def supervised_examples(
    groups: Mapping[str, Sequence[Candidate]], said: Said, *, min_reward: float | None, agents: frozenset[str]
) -> Examples:
    """Every whole call of the best rollout of each group: {"prompt", "completion"}, and "tools" where any were offered.

    Of equally good rollouts the one with the fewest calls is taken. Reasons: `below_min_reward` and `no_text` count groups,
    `cut_off` and `not_selected` calls.
    """
    made = Examples(groups=len(groups))
    for candidates in groups.values():
        highest = max(candidate.reward for candidate in candidates)
        if min_reward is not None and highest < min_reward:
            made.skipped["below_min_reward"] += 1
            continue
        best = [candidate for candidate in candidates if candidate.reward == highest]
        spoken = [(candidate, said(candidate.key)) for candidate in best]
        telling = [(candidate, calls) for candidate, calls in spoken if calls]
        if not telling:
            made.skipped["no_text"] += 1
            continue
        chosen, calls = min(telling, key=lambda pair: (len(pair[1]), pair[0].key))
        kept = _kept(calls, agents, made.skipped)
        for call in kept:
            made.rows.append({"prompt": call.prompt, "completion": call.answer, **_tools(call)})
            made.sources.append({"rollout_id": chosen.rollout_id, "attempt": chosen.attempt, "reward": chosen.reward})
        made.groups_used += bool(kept)
    return made


def preference_pairs(
    groups: Mapping[str, Sequence[Candidate]], said: Said, *, min_reward: float | None, agents: frozenset[str]
) -> Examples:
    """One pair a group: {"prompt", "chosen", "rejected"} where its best and its worst rollout part.

    That is the first call at which both were asked the same and answered differently. Reasons, counting groups:
    `one_rollout`, `equal_rewards`, `below_min_reward` (of the best), `no_text`, `no_common_prompt`, `same_answers`; and calls:
    `cut_off`, `not_selected`.
    """
    made = Examples(groups=len(groups))
    for candidates in groups.values():
        rewards = [candidate.reward for candidate in candidates]
        if len(candidates) < 2 or min(rewards) == max(rewards):
            made.skipped["one_rollout" if len(candidates) < 2 else "equal_rewards"] += 1
            continue
        if min_reward is not None and max(rewards) < min_reward:
            made.skipped["below_min_reward"] += 1
            continue
        ends = [
            [
                (candidate, _kept(said(candidate.key), agents, made.skipped))
                for candidate in candidates
                if candidate.reward == end
            ]
            for end in (max(rewards), min(rewards))
        ]
        reason = _add_first_pair(made, *ends)
        if reason is None:
            made.groups_used += 1
        else:
            made.skipped[reason] += 1
    return made


Told = Sequence[tuple[Candidate, Sequence[Speech]]]


def _add_first_pair(made: Examples, best: Told, worst: Told) -> str | None:
    """Adds the pair of the first two rollouts that part; else why there is none."""
    reason = (
        "no_text" if not any(calls for _, calls in best) or not any(calls for _, calls in worst) else "no_common_prompt"
    )
    for good, good_calls in best:
        for bad, bad_calls in worst:
            asked: dict[tuple[str | None, str], list[Speech]] = {}
            for call in bad_calls:
                asked.setdefault((call.agent, _same(call.prompt)), []).append(call)
            for call in good_calls:
                for other in asked.get((call.agent, _same(call.prompt)), ()):
                    if _same(call.answer) == _same(other.answer):
                        reason = "same_answers"
                        continue
                    row = {"prompt": call.prompt, "chosen": call.answer, "rejected": other.answer, **_tools(call)}
                    made.rows.append(row)
                    made.sources.append(
                        {
                            "chosen": {"rollout_id": good.rollout_id, "attempt": good.attempt, "reward": good.reward},
                            "rejected": {"rollout_id": bad.rollout_id, "attempt": bad.attempt, "reward": bad.reward},
                        }
                    )
                    return None
    return reason


def _kept(calls: Sequence[Speech], agents: frozenset[str], skipped: Counter[str]) -> list[Speech]:
    selected = [call for call in calls if not agents or call.agent in agents]
    whole = [call for call in selected if call.is_whole]
    for reason, count in (("not_selected", len(calls) - len(selected)), ("cut_off", len(selected) - len(whole))):
        if count:
            skipped[reason] += count
    return whole


def _same(said: Any) -> str:
    return said if isinstance(said, str) else same_messages(said)


def _tools(call: Speech) -> dict[str, Any]:
    return {"tools": [json.loads(tool) for tool in call.tools]} if call.tools else {}
