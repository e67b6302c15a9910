"""The distributions of a dataset's manifest, worked by hand."""

import polars as pl

from trainspan_processing.credit.distribution import distribution, group_spread


def test_a_distribution_has_order_statistics_that_occur_and_counts_every_value_once() -> None:
    values = distribution(pl.Series([0.0, 0.25, None, 0.5, 10.0]))
    assert values["n"] == 4
    assert (values["min"], values["p10"], values["p50"], values["p90"], values["max"]) == (0.0, 0.0, 0.25, 0.5, 10.0)
    assert values["mean"] == 2.6875
    assert (values["edges"][0], values["edges"][-1], len(values["counts"])) == (0.0, 10.0, 20)
    assert values["counts"] == [2, 1, *[0] * 16, 0, 1]


def test_whole_numbers_in_a_small_range_get_a_bin_each() -> None:
    values = distribution(pl.Series([2, 3, 3, 5]))
    assert values["edges"] == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert values["counts"] == [1, 2, 0, 1]


def test_equal_values_are_one_bin_and_no_value_is_no_bin() -> None:
    assert distribution(pl.Series([0.5, 0.5]))["counts"] == [2]
    nothing = distribution(pl.Series([], dtype=pl.Float64))
    assert (nothing["n"], nothing["mean"], nothing["counts"]) == (0, None, [])


def test_groups_of_one_and_groups_of_equal_rewards_are_distinguished() -> None:
    rollouts = pl.DataFrame({"group_id": ["a", "b", "b", "c", "c"], "reward": [1.0, 0.5, 0.5, 0.0, 1.0]})
    assert group_spread(rollouts) == {"seen": 3, "singleton": 1, "zero_spread": 1}
