import math

import pytest

from trainspan_cli.loop.intervals import Rate, t_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Wilson's score interval for the textbook cases: 0 of 10 ends at z²/(n+z²); 50 of 100 is symmetric.
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        (50, 100, 0.403832, 0.596168),
        (105, 500, 0.176577, 0.247845),
    ],
)
def test_wilson_intervals_equal_the_closed_form(successes: int, n: int, low: float, high: float) -> None:
    found_low, found_high = Rate(successes, n).interval
    assert found_low == pytest.approx(low, abs=2e-6)
    assert found_high == pytest.approx(high, abs=2e-6)


def test_no_trials_say_nothing() -> None:
    assert Rate(0, 0).interval == (0.0, 1.0)
    assert math.isnan(Rate(0, 0).value)


def test_the_interval_of_a_mean_is_students() -> None:
    # 1, 2, 3: mean 2, s = 1, t(2) = 4.3027, half = 4.3027/√3
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48416, 2 + 2.48416), abs=1e-4)
    assert t_interval([1.0]) is None
    # t(19) = 2.0930: half = 2.0930·s/√20 with s² = 20·.25/19
    low, high = t_interval([0.0, 1.0] * 10) or (math.nan, math.nan)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert (high - low) / 2 == pytest.approx(2.0930 * math.sqrt(5 / 19) / math.sqrt(20), rel=1e-3)
