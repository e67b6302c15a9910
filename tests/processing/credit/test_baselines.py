"""Each baseline, worked by hand."""

import math
import statistics
from collections.abc import Collection

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processing.support.estimates import Rollout, advantages
from trainspan_processing.credit.baselines import BASELINES, EPSILON
from trainspan_schemas.errors import UsageError


def _rollouts(
    groups: list[list[float]], *, history: list[float] | None = None, branches: Collection[int] = ()
) -> pl.DataFrame:
    """Rollouts with these rewards; they ended in this order, after those of `history`. `branches`: numbers of groups of branches.

    Their ids have the opposite order.
    """
    rewards = [(reward, None, True) for reward in history or []]
    rewards += [(reward, group, False) for group, members in enumerate(groups) for reward in members]
    return pl.DataFrame(
        {
            "item": [None if past else number for number, (_, _, past) in enumerate(rewards)],
            "rollout_id": [f"r{9999 - number}" for number in range(len(rewards))],
            "attempt": [0] * len(rewards),
            "is_branch": [group in branches for _, group, _ in rewards],
            "rollout": [None if past else number for number, (_, _, past) in enumerate(rewards)],
            "group": [group for _, group, _ in rewards],
            "pool": [0] * len(rewards),
            "value": [reward for reward, _, _ in rewards],
            "run_id": ["run"] * len(rewards),
            "end_ns": list(range(len(rewards))),
            "history": [past for _, _, past in rewards],
        },
        schema_overrides={
            **dict.fromkeys(("item", "rollout", "group", "pool"), pl.UInt32),
            "attempt": pl.Int32,
            "value": pl.Float64,
        },
    )


def _advantages(
    name: str, groups: list[list[float]], *, history: list[float] | None = None, branches: Collection[int] = ()
) -> list[float]:
    """Advantages of rollouts with calls credited with the rollout's reward."""
    compared = BASELINES[name](_rollouts(groups, history=history, branches=branches)).sort("item")
    return compared.select((pl.col("value") - pl.col("center")) * pl.col("scale")).to_series().to_list()


def _reasons(name: str, groups: list[list[float]]) -> list[str | None]:
    return BASELINES[name](_rollouts(groups)).sort("item")["drop"].to_list()


def test_grpo_divides_the_distance_from_the_group_mean_by_its_spread() -> None:
    # μ = 3, σ = √((4 + 0 + 4) / 2) = 2
    assert _advantages("grpo", [[1.0, 3.0, 5.0]]) == pytest.approx([-2 / 2.0001, 0.0, 2 / 2.0001])


def test_dr_grpo_is_the_distance_from_the_group_mean() -> None:
    assert _advantages("dr_grpo", [[1.0, 3.0, 5.0], [0.0, 1.0]]) == pytest.approx([-2.0, 0.0, 2.0, -0.5, 0.5])


def test_rloo_is_the_distance_from_the_mean_of_the_others() -> None:
    # 1 − (3+5)/2, 3 − (1+5)/2, 5 − (1+3)/2
    assert _advantages("rloo", [[1.0, 3.0, 5.0]]) == pytest.approx([-3.0, 0.0, 3.0])


def test_batch_centers_by_group_and_scales_by_all_rollouts() -> None:
    # all: 0, 2, 4, 6 → μ = 3, σ = √((9 + 1 + 1 + 9) / 3) = √(20/3)
    scale = math.sqrt(20 / 3)
    assert _advantages("batch", [[0.0, 2.0], [4.0, 6.0]]) == pytest.approx([-1 / scale, 1 / scale] * 2)


def test_global_centers_and_scales_by_all_rollouts() -> None:
    scale = math.sqrt(20 / 3)
    expected = [-3 / scale, -1 / scale, 1 / scale, 3 / scale]
    assert _advantages("global", [[0.0], [2.0], [4.0], [6.0]]) == pytest.approx(expected)


def test_running_compares_with_the_rewards_before_it_in_order_of_end() -> None:
    # nothing before the first; then 4; then (4+2)/2 = 3; then (4+2+6)/3 = 4
    assert _advantages("running", [[4.0, 2.0, 6.0, 5.0]]) == pytest.approx([0.0, -2.0, 3.0, 1.0])
    assert _reasons("running", [[4.0, 2.0]]) == ["singleton_group", None]


def test_running_takes_earlier_datasets_into_its_mean_and_no_more_than_256_rewards() -> None:
    assert _advantages("running", [[4.0]], history=[1.0, 2.0]) == pytest.approx([2.5])
    # the outlier reward of 1000 is the 257th before it
    assert _advantages("running", [[4.0]], history=[1000.0] + [1.0] * 256) == pytest.approx([3.0])


def test_running_looks_only_at_its_own_run() -> None:
    rollouts = _rollouts([[4.0]], history=[1.0]).with_columns(pl.Series("run_id", ["other", "run"]))
    assert BASELINES["running"](rollouts)["drop"].to_list() == ["singleton_group"]


def test_rae_moves_its_baseline_by_a_twentieth_before_it_compares() -> None:
    # b: .05·1 = .05; .95·.05 + .05·0 = .0475; .95·.0475 + .05·3 = .195125
    assert _advantages("rae", [[1.0, 0.0, 3.0]]) == pytest.approx([0.95, -0.0475, 3.0 - 0.195125])
    # before it: .05·2 = .1
    assert _advantages("rae", [[1.0]], history=[2.0]) == pytest.approx([1.0 - 0.145])


def test_none_is_the_reward_itself() -> None:
    assert _advantages("none", [[1.0, -3.0]]) == [1.0, -3.0]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "batch"])
def test_groups_without_contrast_have_advantage_zero_and_a_reason(name: str) -> None:
    groups = [[0.1, 0.1, 0.1], [5.0], [0.0, 1.0]]
    assert _advantages(name, groups)[:4] == [0.0] * 4
    zero, alone = "zero_spread_group", "singleton_group"
    assert _reasons(name, groups) == [zero, zero, zero, alone, None, None]


def test_a_batch_without_spread_has_nothing_to_scale_by() -> None:
    assert _reasons("global", [[2.0], [2.0]]) == ["zero_spread_group"] * 2
    assert _reasons("global", [[2.0]]) == ["singleton_group"]
    assert _advantages("global", [[2.0], [2.0]]) == [0.0, 0.0]


_ALIKE = [0.1 + 0.2, 0.3, 0.1 * 3]
"""The same reward computed in three ways, two of which differ in the last digit."""


@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"none", "rae", "running"}))
def test_rewards_that_differ_by_rounding_alone_have_advantage_zero(name: str) -> None:
    assert len(set(_ALIKE)) == 2
    assert _reasons(name, [_ALIKE]) == ["zero_spread_group"] * 3
    assert _advantages(name, [_ALIKE]) == [0.0] * 3
    # terms that cancel except for rounding give 0
    assert _advantages(name, [[0.1 + 0.2 - 0.3, 0.0]]) == [0.0, 0.0]


@pytest.mark.parametrize("name", ["global", "batch"])
def test_all_equal_rewards_have_advantage_exactly_zero_in_whatever_groups(name: str) -> None:
    assert _advantages(name, [[0.1] * 3, [0.1] * 7]) == [0.0] * 10


def test_running_gives_a_reward_like_all_before_it_exactly_zero() -> None:
    assert _advantages("running", [[0.1] * 300]) == [0.0] * 300


@pytest.mark.parametrize("name", ["grpo", "batch", "global"])
def test_small_rewards_that_do_differ_are_no_rounding(name: str) -> None:
    assert _reasons(name, [[1e-6, 1.001e-6]]) == [None, None]
    assert _reasons(name, [[1e6, 1e6 + 1.0]]) == [None, None]


_REWARDS = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), min_size=1, max_size=5)


@given(_REWARDS, st.sampled_from(["grpo", "dr_grpo", "batch", "rloo"]))
def test_advantages_of_a_group_sum_to_zero_and_are_finite(groups: list[list[float]], name: str) -> None:
    advantages = _advantages(name, groups)
    start = 0
    for members in groups:
        of_group = advantages[start : start + len(members)]
        start += len(members)
        assert all(math.isfinite(value) for value in of_group)
        assert sum(of_group) == pytest.approx(0.0, abs=1e-6 * max(1.0, *map(abs, of_group)))


def test_epsilon_is_the_usual_one() -> None:
    assert EPSILON == 1e-4


def test_branches_are_compared_with_each_other_only() -> None:
    """Ordinary rollouts 1, 0; branches from a lost state 0, 0 and from an open one 1, 0; ordinary rollouts 1, 0 again."""
    groups, branches = [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]], (1, 2)
    of_branches = {"running": [0.0, 0.0, 0.5, -0.5], "rae": [0.0, 0.0, 0.5, -0.5]}
    sigma = math.sqrt(4 * 0.25 / 3)  # of 1, 0, 1, 0
    of_branches |= {name: [0.0, 0.0, 0.5 / sigma, -0.5 / sigma] for name in ("global", "batch")}
    for name, expected in of_branches.items():
        found = _advantages(name, groups, branches=branches)
        without = _advantages(name, [groups[0], groups[3]])
        assert [*found[:2], *found[6:]] == pytest.approx(without), name
        assert found[2:6] == pytest.approx(expected), name


def test_branches_that_are_alone_are_scaled_by_their_own_spread() -> None:
    sigma = math.sqrt(4 * 0.25 / 3)
    for name in ("global", "batch"):
        found = _advantages(name, [[1.0, 0.0], [1.0, 0.0]], branches=(0, 1))
        assert found == pytest.approx([0.5 / sigma, -0.5 / sigma] * 2), name
        # The others are equal, so that nothing is divided by their spread: 1, 1, 1, 0 have σ = ½.
        found = _advantages(name, [[1.0, 1.0], [1.0, 0.0]], branches=(1,))
        assert found == pytest.approx([0.0, 0.0, 1.0, -1.0]), name


def test_rollouts_of_a_group_with_judges_of_their_own_are_scaled_by_the_groups_spread() -> None:
    """Each is alone in the pool of its judge, which has no spread."""
    apart = [Rollout(1.0, [None], judge="a"), Rollout(0.0, [None], judge="b")]
    assert advantages(apart, baseline="batch") == pytest.approx([0.5**0.5, -(0.5**0.5)])
    with_pool = [*apart, Rollout(3.0, [None], judge="a", group=1), Rollout(1.0, [None], judge="a", group=1)]
    spread = statistics.stdev([1.0, 3.0, 1.0])
    assert advantages(with_pool, baseline="batch") == pytest.approx(
        [0.5 / spread, -(0.5**0.5), 1.0 / spread, -1.0 / spread]
    )


def _columns(items: pl.DataFrame, center: pl.Expr, scale: pl.Expr, drop: pl.Expr) -> pl.DataFrame:
    return items.filter(~pl.col("history")).with_columns(center=center, scale=scale, drop=drop)


def shifted(items: pl.DataFrame) -> pl.DataFrame:
    return _columns(items, pl.col("value").shift(1), pl.lit(1.0), pl.lit(None, dtype=pl.String))


def unscaled(items: pl.DataFrame) -> pl.DataFrame:
    return _columns(items, pl.lit(0.0), pl.lit(None, dtype=pl.Float64), pl.lit(None, dtype=pl.String))


def whole_numbers(items: pl.DataFrame) -> pl.DataFrame:
    return _columns(items, pl.lit(0), pl.lit(2), pl.lit(None))


def ones(calls: pl.DataFrame, gamma: float) -> pl.DataFrame:
    return calls.with_columns(pl.when(pl.col("rollout_reward") > 0).then(1).otherwise(0).alias("return"))


@pytest.mark.parametrize("name", ["shifted", "unscaled"])
def test_a_baseline_with_a_missing_center_or_scale_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="returned a center or scale that is not a finite number"):
        advantages([Rollout(1.0, [None]), Rollout(0.0, [None])], baseline=f"{__name__}:{name}")


def test_functions_may_return_whole_numbers_and_no_reason() -> None:
    rollouts = [Rollout(1.0, [None, None], agents="ab"), Rollout(0.0, [None, None], agents="ab")]
    credit, baseline = f"{__name__}:ones", f"{__name__}:whole_numbers"
    assert advantages(rollouts, credit=credit, baseline=baseline) == [2.0, 2.0, 0.0, 0.0]
    one, other = advantages(rollouts, credit=credit, baseline=baseline, combine="gdpo")[::2]
    assert (one > 0, other) == (True, pytest.approx(-one))
    per_agent = advantages(rollouts, credit="per_agent", agent_credit=f"a={credit}+{baseline},*=identical+rloo")
    assert per_agent == [2.0, 1.0, 0.0, -1.0]
