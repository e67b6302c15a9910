"""What marks a rollout by its rewards: each rollout stays one row, however many rewards it has."""

import polars as pl
import pytest

from trainspan_processing.rewards.binding import UNCLEAR
from trainspan_processing.rewards.rollout_rewards import _with_lesson, _with_unclear
from trainspan_schemas.config.dataset import DatasetSettings

ROLLOUTS = pl.DataFrame({"rollout_id": list("abc"), "attempt": [0, 1, 0], "status": ["ok", "timeout", "timeout"]})


@pytest.mark.parametrize(("credit", "unclear"), [("return_to_go", [False, True, False]), ("identical", [False] * 3)])
def test_a_rollout_with_unclear_rewards_is_marked_if_its_credit_needs_their_calls(
    credit: str, unclear: list[bool]
) -> None:
    rules = [("b", 1, UNCLEAR), ("b", 1, UNCLEAR), ("b", 0, UNCLEAR), ("a", 0, "span"), ("c", 0, "rollout")]
    edges = pl.DataFrame(rules, schema=["rollout_id", "attempt", "rule"], orient="row")
    marked = _with_unclear(ROLLOUTS, edges, DatasetSettings(credit=credit))
    assert marked.drop("reward_unclear").equals(ROLLOUTS)
    assert marked["reward_unclear"].to_list() == unclear


def test_a_rollout_teaches_if_it_is_ok_or_has_a_reward_in_spite_of_its_status() -> None:
    taught = pl.DataFrame({"rollout_id": ["b", "b", "c"], "attempt": [1, 1, 7]})
    marked = _with_lesson(ROLLOUTS, taught)
    assert marked.drop("teaches").equals(ROLLOUTS)
    assert marked["teaches"].to_list() == [True, True, False]
