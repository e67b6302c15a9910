"""The limit on how far a round's steps move the policy."""

import pytest

from trainspan_training.objective.trust_region import TrustRegion


def test_the_step_that_would_pass_the_target_is_shortened_to_reach_it_and_is_the_last() -> None:
    region = TrustRegion(0.09)
    assert region.limit(1.0, 0.0) == 1.0, "nothing has moved"
    assert region.limit(1.0, 0.01) == 1.0, "two steps of one length: .04"
    assert not region.reached
    # At distance 2 the divergence is .04; 3 would be .09 exactly.
    assert region.limit(1.5, 0.04) == pytest.approx(1.0)
    assert region.reached


def test_rates_that_rise_count_by_their_length() -> None:
    region = TrustRegion(0.16)
    assert region.limit(1.0, 0.0) == 1.0
    assert region.limit(2.0, 0.01) == 2.0, "predicted: .09"
    # The policy moved half as far as predicted: .0225 at distance 3, so .16 at distance 8.
    assert region.limit(4.0, 0.0225) == 4.0
    assert not region.reached
    assert region.limit(4.0, 0.1225) == pytest.approx(1.0), "distance 7, as measured"
    assert region.reached


@pytest.mark.parametrize("k3", [0.0951, 0.1, 3.0])
def test_a_step_at_or_just_before_the_target_is_not_made(k3: float) -> None:
    region = TrustRegion(0.1)
    region.limit(1.0, 0.0)
    assert region.limit(1.0, k3) == 0.0
    assert region.reached


def test_without_a_target_every_step_is_made() -> None:
    region = TrustRegion(0.0)
    assert [region.limit(1.0, k3) for k3 in (0.0, 5.0, 50.0)] == [1.0] * 3
    assert not region.reached
