"""The corrections of tokens that another policy sampled, at their boundaries."""

from dataclasses import replace

import numpy as np
import pytest

from trainspan_training.data.micro_batches import dummy
from trainspan_training.objective.off_policy import Correction, OffPolicySums, correct

WEIGHTS = np.array([4.0, 0.25, 0.3, 0.3, 3.0])
"""w of each token, of three calls whose geometric means are 1, .3 and 3."""
CALLS = np.array([7, 7, 8, 8, 9])


@pytest.mark.parametrize(
    ("correction", "factors", "bounded", "rejected"),
    [
        (Correction("truncate", 2.0), [2.0, 0.25, 0.3, 0.3, 2.0], 2, 0),
        (Correction("truncate", 4.1), [4.0, 0.25, 0.3, 0.3, 3.0], 0, 0),
        (Correction("mask", 3.9), [0.0, 0.0, 0.3, 0.3, 3.0], 2, 0),
        (Correction("mask", 4.1), [4.0, 0.25, 0.3, 0.3, 3.0], 0, 0),
        (Correction("none", 2.0), [1.0] * 5, 0, 0),
        (Correction("truncate", 2.0, per_call=True), [1.0, 1.0, 0.3, 0.3, 2.0], 1, 0),
        # 1/.3 = 3.33: a call may be as much less likely as it may be more likely.
        (Correction("truncate", 2.0, reject_ratio=3.4), [2.0, 0.25, 0.3, 0.3, 2.0], 2, 0),
        (Correction("truncate", 2.0, reject_ratio=3.1), [2.0, 0.25, 0.0, 0.0, 2.0], 2, 1),
        (Correction("truncate", 2.0, reject_ratio=2.9), [2.0, 0.25, 0.0, 0.0, 0.0], 2, 2),
    ],
)
def test_a_token_counts_by_its_weight_within_bounds_and_by_that_of_its_call(
    correction: Correction, factors: list[float], bounded: int, rejected: int
) -> None:
    sampled = np.array([-1.0, -2.0, -3.0, -4.0, -5.0])
    advantages = np.array([1.0, -1.0, 2.0, 2.0, 0.5])
    batch = replace(dummy(5), calls=CALLS, sampled=sampled, advantages=advantages)
    old = sampled + np.log(WEIGHTS)
    corrected, sums = correct(batch, old, correction)
    assert corrected.advantages == pytest.approx(advantages * factors)
    assert corrected.old is old
    assert corrected.weights is batch.weights
    assert (sums.bounded, sums.rejected_calls, sums.calls, sums.tokens) == (bounded, rejected, 3, 5)
    means = np.array([1.0, 1.0, 0.3, 0.3, 3.0])
    measured = means if correction.per_call else WEIGHTS
    assert (sums.weight, sums.max_weight) == pytest.approx((measured.sum(), measured.max()))
    assert sums.effective_share == pytest.approx(measured.sum() ** 2 / (5 * (measured**2).sum()))


def test_the_sums_of_micro_batches_are_added_and_of_the_greatest_weights_the_greater_stays() -> None:
    added = OffPolicySums(*range(1, 8), max_weight=9.0) + OffPolicySums(*range(10, 80, 10), max_weight=3.0)
    assert added == OffPolicySums(11, 22, 33, 44, 55, 66, 77, max_weight=9.0)
    assert added + OffPolicySums() == added
