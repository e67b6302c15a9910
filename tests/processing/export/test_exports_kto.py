"""Unpaired examples: which calls are good, by a reward or by their group, and what is left out by name."""

from trainspan_processing.export.candidates import RewardedRollout
from trainspan_processing.export.conversations import RecordedCall
from trainspan_processing.export.kto import judged_examples


def _call(answer: str, *, is_whole: bool = True, agent: str | None = None) -> RecordedCall:
    return RecordedCall(agent, None, f"ask {answer}", answer, is_whole)


CALLS = {
    "a": [_call("a1"), _call("a2", is_whole=False), _call("a3", agent="helper")],
    "b": [_call("b1")],
    "c": [_call("c1")],
    "d": [_call("d1")],
    "silent": [],
}
GROUPS = {
    "mixed": [RewardedRollout("a", 0, "mixed", 0.9), RewardedRollout("b", 0, "mixed", 0.2)],
    "equal": [RewardedRollout("c", 0, "equal", 0.5), RewardedRollout("d", 0, "equal", 0.5)],
    "silent": [RewardedRollout("silent", 0, "silent", 1.0)],
}


def _labels(min_reward: float | None, agents: frozenset[str] = frozenset()) -> tuple[dict[str, bool], dict[str, int]]:
    made = judged_examples(GROUPS, lambda key: CALLS[key[0]], min_reward=min_reward, agents=agents)
    assert [source["rollout_id"] for source in made.sources] == [row["completion"][0] for row in made.rows]
    assert all(row["prompt"] == f"ask {row['completion']}" for row in made.rows)
    return {row["completion"]: row["label"] for row in made.rows}, dict(made.skipped)


def test_without_a_threshold_a_call_is_good_if_its_rollout_is_above_its_group() -> None:
    labels, skipped = _labels(None)
    assert labels == {"a1": True, "a3": True, "b1": False}
    assert skipped == {"equal_rewards": 2, "cut_off": 1}


def test_with_a_threshold_every_rollout_counts() -> None:
    labels, skipped = _labels(0.5, frozenset({"helper"}))
    assert labels == {"a3": True}
    assert skipped == {"not_selected": 5, "no_text": 1}
    labels, skipped = _labels(0.9)
    assert labels == {"a1": True, "a3": True, "b1": False, "c1": False, "d1": False}
    assert skipped == {"cut_off": 1, "no_text": 1}
