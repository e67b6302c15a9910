"""Calls cut off by length: kept, masked or penalized."""

from typing import Any

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout
from trainspan_processing.assembly.build import BuiltDataset
from trainspan_processing.dataset.ledger import read_ledger
from trainspan_processing.reasons.advice import ADVICE
from trainspan_processing.rewards.definition import reward_digest
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError

_LENGTH = {"gen_ai__response__finish_reasons": ["length"]}
_LENGTHS = "tests.processing.support.reward_functions:length"


def _sent(bench: Bench) -> None:
    """a: a call that stopped by itself and one cut off, reward 3; b: one that stopped, reward 1; c: one cut off, 0."""
    a, b, c = (bench.rollout(name).reward(score) for name, score in (("a", 3.0), ("b", 1.0), ("c", 0.0)))
    a.call(0, [1], [2, 3])
    a.call(1, [1, 2, 3, 4], [5], **_LENGTH)
    b.call(0, [1], [6, 7, 8])
    c.call(0, [1], [9, 9, 9, 9], **_LENGTH)
    bench.send(a, b, c)


def _calls(built: BuiltDataset) -> list[tuple[Any, ...]]:
    """(rollout's letter, call index, return, advantage) of each row."""
    table = rows(built).select("rollout_id", "call_index", "return", "advantage")
    return [(rollout_id[-1], *rest) for rollout_id, *rest in table.iter_rows()]


def test_they_are_kept_by_default(bench: Bench) -> None:
    _sent(bench)
    built = bench.build(round_=0, baseline="none")
    assert _calls(built) == [("a", 0, 3.0, 3.0), ("a", 1, 3.0, 3.0), ("b", 0, 1.0, 1.0), ("c", 0, 0.0, 0.0)]


def test_masked_calls_are_left_out_by_name_and_their_rollouts_are_still_compared(bench: Bench) -> None:
    _sent(bench)
    built = bench.build(round_=0, baseline="dr_grpo", overlong="mask")
    # R = 3, 1, 0: μ = 4/3, including the rollout without remaining calls
    expected = [("a", 0, 3.0, pytest.approx(5 / 3)), ("b", 0, 1.0, pytest.approx(-1 / 3))]
    assert _calls(built) == expected
    assert built.manifest["dropped"] == {"overlong": 2}
    assert built.manifest["coverage"] == 1.0
    digest = reward_digest(DatasetSettings(overlong="mask"))
    assert read_ledger(bench.out).history(digest).values["value"].sort().to_list() == [0.0, 1.0, 3.0]
    assert "max_tokens" in ADVICE["overlong"]


def test_punished_calls_lower_what_their_rollouts_earned(bench: Bench) -> None:
    _sent(bench)
    built = bench.build(round_=0, baseline="dr_grpo", overlong="punish", overlong_penalty=0.5)
    # R = 2.5, 1, −.5: μ = 1
    assert _calls(built) == [("a", 0, 2.5, 1.5), ("a", 1, 2.5, 1.5), ("b", 0, 1.0, 0.0), ("c", 0, -0.5, -1.5)]
    assert rows(built)["reward"].to_list() == [None, -0.5, None, -0.5]
    assert built.manifest["credit"]["rewards"] == {"reward": 1.0, "overlong": 1.0}


def test_rollouts_without_a_penalty_are_compared_with_those_that_have_one_if_each_reward_is_compared_by_itself(
    bench: Bench,
) -> None:
    _sent(bench)
    settings = {"baseline": "dr_grpo", "combine": "gdpo", "overlong_penalty": 0.5}
    built = bench.build(round_=0, overlong="punish", **settings)
    # Of the rewards 3, 1, 0 and of the penalties −.5, 0, −.5: 5/3 − 1/6, −1/3 + 1/3, −4/3 − 1/6, in units of their spread
    assert [row[3] for row in _calls(built)] == pytest.approx([1.0, 1.0, 0.0, -1.0], abs=1e-3)


def test_the_penalty_is_one_by_default_and_falls_on_the_call_alone_if_credit_is_per_call(bench: Bench) -> None:
    _sent(bench)
    built = bench.build(round_=0, baseline="none", overlong="punish", credit="return_to_go")
    assert [row[2] for row in _calls(built)] == [2.0, 2.0, 1.0, -1.0]
    built = bench.build(round_=0, baseline="none", overlong="punish", credit="step", out=bench.out / "step")
    # the first call of a earned nothing itself
    assert [row[:3] for row in _calls(built)] == [("a", 1, 2.0), ("b", 0, 1.0), ("c", 0, -1.0)]


def test_punishment_goes_with_a_reward_function_and_with_rules_of_the_trace(bench: Bench) -> None:
    _sent(bench)
    built = bench.build(
        round_=0, baseline="none", overlong="punish", reward=_LENGTHS, air="tool_error=-0.1", overlong_penalty=2.0
    )
    # 3 tokens − 2, 3, 4 − 2
    assert [row[2] for row in _calls(built)] == [1.0, 1.0, 3.0, 2.0]


def test_a_penalty_alone_rewards_no_rollout(bench: Bench) -> None:
    cut = bench.rollout("d")
    cut.call(0, [1], [2], **_LENGTH)
    _sent(bench)
    bench.send(cut)
    built = bench.build(round_=0, overlong="punish")
    assert built.manifest["dropped"] == {"no_reward": 1}


def _best_of_two(bench: Bench, name: str, reward: float, *, used: int) -> TestRollout:
    """Two answers to one request, the second cut off by length; the agent continues the one numbered `used`."""
    rollout = bench.rollout(name).reward(reward)
    for choice, answer in enumerate(([2], [3, 3])):
        more = {"gen_ai__response__id": f"r-{rollout.rollout_id}", "trainspan__choice__index": choice}
        rollout.call(0, [1], answer, **more, **(_LENGTH if choice else {}))
    rollout.call(1, [1, *([3, 3] if used else [2]), 4], [5])
    return rollout


def test_answers_that_the_agent_discarded_are_not_punished(bench: Bench) -> None:
    bench.send(_best_of_two(bench, "a", 3.0, used=0), _best_of_two(bench, "b", 3.0, used=1))
    built = bench.build(round_=0, baseline="none", overlong="punish")
    assert _calls(built) == [("a", 0, 3.0, 3.0), ("a", 1, 3.0, 3.0), ("b", 0, 2.0, 2.0), ("b", 1, 2.0, 2.0)]
    assert rows(built)["reward"].to_list() == [None, None, -1.0, None]
    assert built.manifest["dropped"] == {"unused_choice": 2}
    built = bench.build(round_=0, baseline="none", overlong="punish", choices="all", out=bench.out / "all")
    assert {row[2] for row in _calls(built)} == {2.0}


def test_an_answer_counts_as_used_for_the_penalty_if_it_does_for_training(bench: Bench) -> None:
    """The call that continues the first answer is not trained, so that nothing shows which answer was used."""
    rollout = _best_of_two(bench, "a", 3.0, used=0)
    rollout.spans[-1].attributes["gen_ai.request.temperature"] = 0.0
    bench.send(rollout, _best_of_two(bench, "b", 3.0, used=1))
    built = bench.build(round_=0, baseline="none", overlong="punish")
    assert [row[:3] for row in _calls(built)] == [("a", 0, 2.0), ("a", 0, 2.0), ("b", 0, 2.0), ("b", 1, 2.0)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlong_penalty": 1.0}, "overlong_penalty = 1 has no effect: overlong is 'keep'"),
        ({"overlong": "punish", "overlong_penalty": -1.0}, "overlong_penalty = -1 must be a number greater than 0"),
        ({"overlong": "punish", "overlong_penalty": float("nan")}, "overlong_penalty = nan must be a number"),
    ],
)
def test_what_cannot_be_meant_is_refused(bench: Bench, settings: dict[str, Any], message: str) -> None:
    bench.send(TestRollout(f"{bench.run_id}-a", run=bench.run_id).reward(1.0))
    with pytest.raises(UsageError, match=message):
        bench.build(**settings)
