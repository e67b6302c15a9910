import json
import math

import pytest

from trainspan_schemas.intervals import RewardEstimate, measured, t_interval


def solved(successes: int, n: int) -> list[list[float]]:
    return [[1.0]] * successes + [[0.0]] * (n - successes)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Wilson's score interval for the textbook cases: 0 of 10 ends at z²/(n+z²); 50 of 100 is symmetric.
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        (1, 1, 1 / 4.841459, 1.0),
        (50, 100, 0.403832, 0.596168),
        (105, 500, 0.176577, 0.247845),
    ],
)
def test_wilson_intervals_equal_the_closed_form(successes: int, n: int, low: float, high: float) -> None:
    estimate = RewardEstimate.of(solved(successes, n))
    assert (estimate.n, estimate.mean, estimate.binary) == (n, successes / n, True)
    assert estimate.interval == pytest.approx((low, high), abs=2e-6)


@pytest.mark.parametrize("n", range(1, 40))
def test_the_interval_of_no_success_begins_at_0_and_that_of_all_ends_at_1_whatever_the_rounding(n: int) -> None:
    none, every = (RewardEstimate.of(solved(successes, n)).interval for successes in (0, n))
    assert none is not None
    assert every is not None
    assert (none[0], every[1]) == (0.0, 1.0)


def test_rewards_that_are_not_all_0_or_1_get_students_interval_over_tasks() -> None:
    # -3.5, 100, 7: mean 34.5, s² = (38² + 65.5² + 27.5²)/2 = 3245.25, t(2) = 4.3027
    estimate = RewardEstimate.of([[-3.5], [100.0], [7.0]])
    assert (estimate.n, estimate.mean, estimate.binary) == (3, 34.5, False)
    half = 4.3027 * math.sqrt(3245.25 / 3)
    assert estimate.interval == pytest.approx((34.5 - half, 34.5 + half))
    assert str(estimate) == f"34.500 [{34.5 - half:.3f}, {34.5 + half:.3f}]"
    # partial rewards within [0, 1] are not successes either
    assert RewardEstimate.of([[0.5], [0.25], [1.0]]).interval == t_interval([0.5, 0.25, 1.0])


def test_rollouts_of_one_task_count_once_by_their_mean() -> None:
    tasks = [[-1.0, 3.0, 10.0], [2.0], [0.0, 6.0], []]
    assert RewardEstimate.of(tasks).interval == t_interval([4.0, 2.0, 3.0])
    # task means of binary rewards are fractions but still success rates: 1/2 and 1 make 3/4 of 2
    halves = RewardEstimate.of([[0.0, 1.0], [1.0, 1.0]])
    assert (halves.n, halves.mean, halves.binary) == (2, 0.75, True)
    assert halves.interval == pytest.approx((0.197867, 0.973323), abs=2e-6)


@pytest.mark.parametrize(
    ("tasks", "shown"),
    [
        ([], "no reward"),
        ([[], []], "no reward"),
        ([[-3.5]], "-3.500"),
        ([[100.0]] * 5, "100.000"),
        ([[0.1]] * 7, "0.100"),
        ([[math.nan], [1.0]], "nan"),
        ([[math.inf], [-math.inf]], "nan"),
        ([[math.inf], [1.0]], "inf"),
        ([[1e308], [1e308], [1e308]], f"{1e308:.3f}"),
    ],
)
def test_what_has_no_interval_is_shown_without_one_and_comes_back_from_json(
    tasks: list[list[float]], shown: str
) -> None:
    estimate = RewardEstimate.of(tasks)
    assert str(estimate) == shown
    record = json.loads(json.dumps(estimate.record(), allow_nan=False))
    assert RewardEstimate.of_record(record).interval == estimate.interval
    assert RewardEstimate.of_record(record).n == len([rewards for rewards in tasks if rewards])


def test_a_mean_is_a_success_rate_only_if_every_reward_is_0_or_1() -> None:
    rate, score = RewardEstimate.of(solved(1, 4)), RewardEstimate.of([[2.0]])
    assert measured([]) == measured([rate, RewardEstimate.of([])]) == "success"
    assert measured([rate, score]) == "reward"


def test_the_interval_of_a_mean_is_students() -> None:
    # 1, 2, 3: mean 2, s = 1, t(2) = 4.3027, half = 4.3027/√3
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48416, 2 + 2.48416), abs=1e-4)
    assert t_interval([1.0]) is None
    # t(19) = 2.0930: half = 2.0930·s/√20 with s² = 20·.25/19
    low, high = t_interval([0.0, 1.0] * 10) or (math.nan, math.nan)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert (high - low) / 2 == pytest.approx(2.0930 * math.sqrt(5 / 19) / math.sqrt(20), rel=1e-3)


def test_rollouts_without_a_reward_are_shown_beside_the_mean_that_they_are_not_in() -> None:
    estimate = RewardEstimate.of([[1.0, None], [1.0, 1.0], [None, None], []])
    assert (estimate.n, estimate.mean, estimate.n_rollouts, estimate.left_out) == (2, 1.0, 6, 3)
    assert str(estimate).endswith("], 3 of 6 rollouts left out")
    assert RewardEstimate.of_record(estimate.record()) == RewardEstimate(2, 1.0, 0.0, True, 6, 3)
    assert str(RewardEstimate.of([[None]])) == "no reward, 1 of 1 rollouts left out"
