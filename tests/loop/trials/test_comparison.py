"""The test that decides whether a new version is worse: worked cases, its level, and laws."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspan_loop.trials.comparison import SHUFFLES, compare, smallest_p

NOISE = 4 / math.sqrt(SHUFFLES)
"""Four standard errors of a share of the shuffles, at most."""


def tasks(*outcomes: list[float]) -> dict[str, list[float]]:
    return {f"t{number}": values for number, values in enumerate(outcomes)}


def test_one_outcome_of_0_or_1_per_task_gives_mcnemars_exact_p() -> None:
    # Of 7 tasks that differ, 6 got worse: P(at least 6 of 7 coin flips) = (7 + 1) / 2^7. Equal tasks say nothing.
    before = tasks(*([[1.0]] * 6), [0.0], [1.0], [0.0])
    after = tasks(*([[0.0]] * 6), [1.0], [1.0], [0.0])
    found = compare(before, after, seed=0)
    assert (found.tasks, found.before, found.after) == (9, pytest.approx(7 / 9), pytest.approx(2 / 9))
    assert found.p == pytest.approx(8 / 128, abs=NOISE)
    assert compare(after, before, seed=0).p == pytest.approx(1 - 1 / 128, abs=NOISE)


def test_several_outcomes_per_task_are_shuffled_within_the_task() -> None:
    # One task, 2 outcomes each: of the 6 ways to choose the new version's two from {1, 1, 0, 0}, one has both zeros.
    assert compare(tasks([1.0, 1.0]), tasks([0.0, 0.0]), seed=0).p == pytest.approx(1 / 6, abs=NOISE)
    # 1 of 2 against 3 outcomes: of the 10 ways to choose two from {1, 1, 1, 0, 0}, all but the three {1, 1} have a mean ≤ 1/2.
    assert compare(tasks([1.0, 1.0, 0.0]), tasks([1.0, 0.0]), seed=0).p == pytest.approx(0.7, abs=NOISE)


def test_rewards_of_any_size_count_by_their_difference() -> None:
    # Differences −3, −2 and +1: of the 8 signs only (−, −, ±) and (−, −, +) are as low: sums −6 and −4.
    before, after = tasks([3.0], [2.0], [0.0]), tasks([0.0], [0.0], [1.0])
    assert compare(before, after, seed=0).p == pytest.approx(2 / 8, abs=NOISE)


def test_equal_outcomes_and_no_common_tasks_are_never_worse() -> None:
    same = tasks([0.3], [0.7], [1.0])
    assert compare(same, same, seed=0).p == 1.0
    nothing = compare({"a": [1.0], "b": []}, {"c": [0.0], "b": [0.0]}, seed=0)
    assert (nothing.tasks, nothing.before, nothing.p) == (0, None, 1.0)


def test_the_smallest_p_says_how_many_tasks_are_needed() -> None:
    assert smallest_p(5, 1) == 1 / 32
    assert smallest_p(2, 2) == 1 / 36
    assert smallest_p(1000, 1) == 1 / (SHUFFLES + 1)
    assert compare(tasks(*([[1.0]] * 5)), tasks(*([[0.0]] * 5)), seed=0).p == pytest.approx(1 / 32, abs=NOISE)


@pytest.mark.ci
@pytest.mark.parametrize(("count", "n"), [(8, 1), (3, 4)])
def test_equal_versions_are_refused_at_most_as_often_as_the_level_says(count: int, n: int) -> None:
    generator = random.Random(5)
    runs, refused = 300, 0
    for seed in range(runs):
        rates = [generator.random() for _ in range(count)]
        before, after = (
            {f"t{place}": [float(generator.random() < rate) for _ in range(n)] for place, rate in enumerate(rates)}
            for _ in range(2)
        )
        refused += compare(before, after, seed).p <= 0.1
    assert refused <= 0.1 * runs + 3 * math.sqrt(runs * 0.1 * 0.9)


OUTCOMES = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=3), max_size=4
)


@settings(max_examples=25, deadline=None)
@given(before=OUTCOMES, after=OUTCOMES, shift=st.sampled_from([-2.0, 0.5, 7.0]))
def test_p_does_not_depend_on_the_scale_of_rewards_or_on_tasks_of_one_version(
    before: dict[str, list[float]], after: dict[str, list[float]], shift: float
) -> None:
    found = compare(before, after, seed=1)
    assert 0 < found.p <= 1
    moved = [{task: [2 * value + shift for value in values] for task, values in one.items()} for one in (before, after)]
    assert compare(*moved, seed=1).p == pytest.approx(found.p, abs=2 * NOISE)
    assert compare({**before, "other": [1.0]}, after, seed=1) == found
