"""Rewards far outside of the others: their rollouts are dropped by name, and nothing else changes."""

from pathlib import Path

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain
from trainspan_schemas.errors import UsageError

OUT = "reward_out_of_range"


@pytest.mark.ci
@pytest.mark.parametrize("baseline", ["grpo", "batch", "rloo", "global", "running", "rae"])
def test_a_huge_reward_costs_its_own_rollout_and_leaves_all_other_advantages(
    bench: Bench, tmp_path: Path, baseline: str
) -> None:
    ordinary = [chain(bench.rollout(name), 1).reward(reward) for name, reward in (("a", 0.0), ("b", 1.0), ("c", 4.0))]
    bench.send(*ordinary)
    alone = bench.build(round_=0, baseline=baseline, out=tmp_path / "alone")
    bench.send(chain(bench.rollout("huge"), 1).reward(-1e160 if baseline == "rloo" else 1.7e308))
    built = bench.build(round_=0, baseline=baseline, min_coverage=0.0)
    assert built.manifest["dropped"] == {**alone.manifest["dropped"], OUT: 1}
    assert rows(built)["advantage"].to_list() == rows(alone)["advantage"].to_list()
    assert built.manifest["rewards"] == alone.manifest["rewards"]
    assert (built.manifest["rewards"]["max"], built.manifest["rewards"]["n"]) == (4.0, 3)


def test_a_huge_reward_is_no_history_of_later_datasets(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(2.0), chain(bench.rollout("b"), 1).reward(1e160))
    bench.build(baseline="rae", min_coverage=0.0)
    bench.send(chain(bench.rollout("c", begins=100.0), 1).reward(2.0))
    # b = .05 · 2 after a, and .95 · .1 + .05 · 2 = .195 after c: its advantage is 2 − .195
    (advantage,) = rows(bench.build(baseline="rae"))["advantage"].to_list()
    assert advantage == pytest.approx(1.805)


@pytest.mark.parametrize("baseline", ["running", "rae"])
def test_a_rollout_without_a_call_is_compared_with_nobody_in_one_dataset_or_two(
    bench: Bench, tmp_path: Path, baseline: str
) -> None:
    first = [chain(bench.rollout(name, begins=begins), 1).reward(1.0) for name, begins in (("a", 0.0), ("b", 10.0))]
    last = chain(bench.rollout("z", begins=100.0), 1).reward(0.5)
    bench.send(*first, bench.rollout("none", begins=20.0, stated_calls=0).reward(-1.0))
    bench.build(baseline=baseline, min_coverage=0.0)
    bench.send(last)
    second = bench.build(baseline=baseline, min_coverage=0.0)
    together = rows(bench.build(baseline=baseline, round_=0, out=tmp_path / "together", min_coverage=0.0))
    expected = together.filter(pl.col("rollout_id") == last.rollout_id)["advantage"].to_list()
    assert rows(second)["advantage"].to_list() == pytest.approx(expected)
    assert second.manifest["history"]["rollouts"] == 2


def test_sums_have_the_limit_too_and_scores_that_cancel_each_other_are_beyond_it(bench: Bench) -> None:
    each = chain(bench.rollout("each"), 2)
    for span in each.spans[-2:]:  # of each call
        each.reward(7.0, on=span.span_id)
    one = chain(bench.rollout("one"), 2)
    one.reward(6.0, on=one.spans[-1].span_id, at=98.0).reward(6.0, on=one.spans[-1].span_id)
    one.reward(-6.0, on=one.spans[-2].span_id)
    bench.send(
        chain(bench.rollout("low"), 1).reward(-10.0),
        chain(bench.rollout("high"), 1).reward(10.0),
        chain(bench.rollout("sum"), 1).reward(6.0, at=98.0).reward(6.0),
        chain(bench.rollout("cancel"), 1).reward(11.0).reward(-11.0),
        each,
        one,
    )
    built = bench.build(round_=0, max_reward=10.0, baseline="none", min_coverage=0.0)
    assert sorted(rows(built)["return"].to_list()) == [-10.0, 10.0]
    assert built.manifest["dropped"] == {OUT: 6}
    assert built.manifest["dropped_rollouts"] == {OUT: 4}


def test_a_weight_can_take_a_reward_beyond_the_limit(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(1.0), chain(bench.rollout("b"), 1).reward(0.5))
    built = bench.build(round_=0, max_reward=10.0, reward_name="reward=15", baseline="none", min_coverage=0.0)
    assert (rows(built)["return"].to_list(), built.manifest["dropped"]) == ([7.5], {OUT: 1})


def test_a_reward_function_has_the_limit_too(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1) for name in "abc"))
    function = "tests.processing.support.reward_functions:huge_on_b"
    built = bench.build(round_=0, reward=function, baseline="none", min_coverage=0.0)
    assert (rows(built)["return"].to_list(), built.manifest["dropped"]) == ([5.0, 5.0], {OUT: 1})


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf"), 1e200])
def test_a_limit_that_is_none_is_refused(bench: Bench, limit: float) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(1.0))
    with pytest.raises(UsageError, match="max_reward"):
        bench.build(max_reward=limit)
