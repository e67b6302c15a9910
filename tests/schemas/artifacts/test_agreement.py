"""Agreement of server and trainer, by their dtypes and by the freshness of the data."""

from dataclasses import asdict

import pytest

from trainspan_schemas.artifacts.agreement import Agreement, applied_limit, is_exact, limit_of


@pytest.mark.parametrize(
    ("server", "trainer", "exact"),
    [
        ("float32", "float32", True),
        (None, "float32", True),
        ("bfloat16", "float32", False),
        ("float16", "float32", False),
        ("float32", "bfloat16", False),
        (None, "bfloat16", False),
    ],
)
def test_the_coarser_dtype_decides_the_limit_unless_the_user_does(
    server: str | None, trainer: str, exact: bool
) -> None:
    assert is_exact(server, trainer) == exact
    assert limit_of(server, trainer, None) == (3e-5 if exact else 0.1)
    assert limit_of(server, trainer, 0.2) == 0.2


def agreement(mean: float | None, k3: float | None, *, fresh: bool = True) -> Agreement:
    return Agreement(mean, k3, 0.1, fresh, "bfloat16", "bfloat16")


def test_bulk_and_tail_must_both_be_within_their_limits() -> None:
    assert not agreement(0.02, 0.001).mismatch
    assert agreement(0.11, 0.001).mismatch, "all tokens are slightly off"
    assert agreement(0.02, 0.02).mismatch, "a few tokens are far off"
    assert agreement(float("nan"), 0.001).mismatch
    assert agreement(None, None).mismatch


def test_calls_of_earlier_versions_may_differ_by_the_movement_of_the_policy() -> None:
    moved = Agreement(0.25, 0.2, 0.1, False, "bfloat16", "bfloat16", moved=0.1)
    assert moved.stale_limit == pytest.approx(0.9)
    assert not moved.mismatch, "k3 is not compared: a few tokens move far"
    assert "mean |Δlogp| 0.25 (limit 0.9: the policy moved by 0.1 since these calls)" in str(moved)
    still = Agreement(0.25, 0.2, 0.1, False, "bfloat16", "bfloat16", moved=0.01)
    assert still.mismatch, "the policy hardly moved, so these are not its calls"
    assert Agreement(float("nan"), 0.2, 0.1, False, "bfloat16", "bfloat16", moved=0.1).mismatch


def test_without_a_known_movement_calls_of_earlier_versions_are_not_judged() -> None:
    stale = agreement(0.3, 0.2, fresh=False)
    assert not stale.mismatch
    assert "not judged" in str(stale)


def test_a_record_names_the_limit_that_it_was_judged_by() -> None:
    assert applied_limit(asdict(agreement(0.02, 0.001))) == 0.1
    assert applied_limit(asdict(Agreement(0.25, 0.2, 0.1, False, "bfloat16", "bfloat16", moved=0.1))) == pytest.approx(
        0.9
    )
    assert applied_limit(asdict(agreement(0.3, 0.2, fresh=False))) is None
