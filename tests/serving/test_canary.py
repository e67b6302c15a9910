"""The verdict on a swap, from log-probabilities alone."""

import math

import pytest

from trainspan_schemas.checkpoint import Canary, CanaryPrompt
from trainspan_serving.canary import judge


def canary(new: list[float], parent: list[float]) -> Canary:
    return Canary("float32", 1e-4, [CanaryPrompt([1], [2] * len(new), new, parent)])


@pytest.mark.parametrize(
    ("scored", "status"),
    [
        ([-1.0, -20.0], "fresh"),
        ([-1.00011, -20.0], "fresh"),  # 1e-4 and 2e-5 of 1.0 are allowed
        ([-1.00013, -20.0], "stale"),
        ([-1.0, -20.0004], "fresh"),  # 1e-4 and 2e-5 of 20.0 are allowed
        ([-1.0, -20.0006], "stale"),
        ([-1.5, -20.0], "stale"),  # the parent's
        ([-1.0, math.nan], "stale"),
    ],
)
def test_agreement_is_sharp_up_to_rounding(scored: list[float], status: str) -> None:
    report = judge(canary([-1.0, -20.0], [-1.5, -20.0]), [scored], 0, tolerance=None, dtype="float32")
    assert report.status == status


def test_weights_that_hardly_moved_prove_nothing() -> None:
    report = judge(canary([-1.0], [-1.00005]), [[-1.0]], 0, tolerance=None, dtype="float32")
    assert report.status == "inconclusive"
    assert report.max_abs_change == pytest.approx(5e-5)


def test_a_server_in_low_precision_is_given_more_room_and_a_setting_wins() -> None:
    moved = canary([-1.0], [-3.0])
    assert judge(moved, [[-1.04]], 0, tolerance=None, dtype="bfloat16").status == "fresh"
    assert judge(moved, [[-1.04]], 0, tolerance=0.01, dtype="bfloat16").status == "stale"


def test_a_prompt_from_the_earlier_weights_cache_is_stale_however_well_the_scores_agree() -> None:
    report = judge(canary([-1.0], [-3.0]), [[-1.0]], 128, tolerance=None, dtype="float32")
    assert (report.status, report.max_abs_diff, report.cached_tokens) == ("stale", 0.0, 128)
