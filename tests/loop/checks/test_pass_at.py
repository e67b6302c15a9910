"""pass@k by hand: of 4 rollouts with 1 success, 3 of the 6 pairs contain it."""

import pytest

from trainspan_loop.checks.pass_at import pass_at, pass_at_k


def test_pass_at_k_is_the_share_of_samples_that_hold_a_success() -> None:
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(4, 3, 2) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    with pytest.raises(ValueError, match="pass@8 needs at least 8 rollouts"):
        pass_at_k(4, 1, 8)


def test_pass_at_is_a_mean_over_tasks_that_have_so_many_rollouts() -> None:
    tasks = [[True, False, False, False], [False, False, False, False, True]]
    # k=1: (1/4 + 1/5)/2; k=2: (1/2 + (1 - 6/10))/2; k=4: (1 + (1 - 1/5))/2
    assert pass_at(tasks) == pytest.approx({1: 0.225, 2: 0.45, 4: 0.9})
    assert pass_at([]) == {}


def test_one_rollout_that_was_left_out_does_not_end_the_curve() -> None:
    """Of ten tasks one may have fewer rollouts; of nine it is more than a tenth."""
    whole = [[True, False]] * 9
    assert pass_at([*whole, [False]]) == pytest.approx({1: 0.45, 2: 1.0})
    assert pass_at([*whole[1:], [False]]) == pytest.approx({1: 4 / 9})
