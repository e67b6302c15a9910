"""The test whether rewards depend on what was sampled."""

import math
from collections.abc import Sequence
from itertools import permutations
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.dataset_files import LoggedCall
from tests.training.support.exactness.references import as_calls
from trainspan_training.metrics.alarms import LEAST_EVIDENCE, SIGNAL_ROUNDS
from trainspan_training.metrics.signal import (
    NO_SIGNAL,
    CallGradients,
    CallLabels,
    Signal,
    best_evidence,
    evidence,
    signal_gate,
    signal_of,
)

GROUPS, SIZE, TOKENS, WIDTH = 4, 8, 5, 12


def of_one_call(advantages: Sequence[float], groups: Sequence[str]) -> CallLabels:
    """Rollouts of one call."""
    count = len(groups)
    return CallLabels(tuple(groups), tuple(range(count)), (0,) * count, tuple(advantages))


def sampled_round(rng: np.random.Generator, strength: float) -> Signal:
    """The test of a round in which each group has a direction of its own, so that only its own rollouts agree.

    The mean of `within` is about 0 with strength 0, and 3.9 with .175.
    """
    names = [f"g{group}" for group in range(GROUPS) for _ in range(SIZE)]
    labels = np.tile([1.0] * (SIZE // 2) + [-1.0] * (SIZE // 2), GROUPS)
    directions, owner = rng.normal(size=(GROUPS, 16)), np.repeat(np.arange(GROUPS * SIZE), 4)
    gradients = strength * labels[owner, None] * directions[owner // SIZE] + rng.normal(size=(len(owner), 16))
    hidden = 1 + 0.3 * rng.normal(size=(len(owner), 16))
    whose = of_one_call(labels.tolist(), names)
    kernel = CallGradients(owner, hidden.astype(np.float32), gradients.astype(np.float32)).kernel(whose.rollouts)
    signal = signal_of(kernel, whose, rng)
    assert signal is not None
    return signal


def red_runs(runs: int, strength: float) -> float:
    """Share of runs whose rewards look independent of the answers after the round that may say so first.

    The evidence only grows: a run that is not red there is never red.
    """
    red = 0
    for run in range(runs):
        rng = np.random.default_rng([round(1000 * strength), run])
        red += best_evidence([sampled_round(rng, strength) for _ in range(SIGNAL_ROUNDS)]) < LEAST_EVIDENCE
    return red / runs


def rollouts(rng: np.random.Generator, *, informative: bool) -> tuple[NDArray[np.float64], CallLabels]:
    """Rollouts of which half sample tokens of one kind; only if `informative` are these the ones with a reward."""
    wanted = rng.normal(size=WIDTH)
    names = [f"g{group}" for group in range(GROUPS) for _ in range(SIZE)]
    labels = np.tile([1.0] * (SIZE // 2) + [-1.0] * (SIZE // 2), GROUPS)
    kinds = labels if informative else rng.permuted(labels.reshape(GROUPS, SIZE), axis=1).ravel()
    owner = np.repeat(np.arange(len(names)), TOKENS)
    gradients = kinds[owner, None] * wanted * 0.5 + rng.normal(size=(len(owner), WIDTH))
    hidden = 1 + 0.3 * rng.normal(size=(len(owner), WIDTH))
    sample, whose = (
        CallGradients(owner, hidden.astype(np.float32), gradients.astype(np.float32)),
        of_one_call(labels, names),
    )
    return sample.kernel(whose.rollouts), whose


def test_the_kernel_is_the_mean_over_pairs_of_tokens() -> None:
    """Call 0 has tokens (g 1, h 1) and (g 3, h 2), call 1 has (g 2, h 5)."""
    sample = CallGradients(
        np.array([0, 0, 1]), np.array([[1], [2], [5]], np.float32), np.array([[1], [3], [2]], np.float32)
    )
    # K_01 = (1·2·1·5 + 3·2·2·5) / 2 = 35; K_00 = (1 + 2·3·2 + 9·4) / 4 = 12.25; K_11 = 4·25.
    assert sample.kernel((0, 1)).tolist() == [[12.25, 35], [35, 100]]
    # As calls of one rollout with three tokens: 70 / 9, 49 / 9, 100 / 9.
    assert sample.kernel((0, 0)) == pytest.approx(np.array([[49, 70], [70, 100]]) / 9)


def test_calls_exchange_advantages_with_those_of_the_same_turn() -> None:
    calls = as_calls(
        [
            LoggedCall(f"rollout-0-{rollout}", [5] * 4, [6], [-1.0], advantage=10.0 * rollout + turn, call_index=turn)
            for rollout, turns in enumerate((2, 1, 3))
            for turn in range(turns)
        ],
        group=lambda call: "g",
    )
    labels = CallLabels.of(calls)
    assert labels.rollouts == (0, 0, 1, 2, 2, 2)
    assert labels.turns == (0, 1, 0, 0, 1, 2)
    assert labels.advantages == (0, 1, 10, 20, 21, 22)


def several_calls(rng: np.random.Generator, *, informative: bool) -> tuple[NDArray[np.float64], CallLabels]:
    """Rollouts of 1 to 5 calls, each with a reward of its own, whose signs differ from call to call."""
    groups, owners, turns, labels = [], [], [], []
    for rollout in range(GROUPS * SIZE):
        for turn in range(rng.integers(1, 6)):
            groups.append(f"g{rollout // SIZE}")
            owners.append(rollout)
            turns.append(turn)
            labels.append(rng.choice([-1.0, 1.0]))
    wanted, count = rng.normal(size=WIDTH), len(labels)
    kinds = np.array(labels) if informative else rng.choice([-1.0, 1.0], count)
    owner = np.repeat(np.arange(count), TOKENS)
    gradients = kinds[owner, None] * wanted * 0.5 + rng.normal(size=(len(owner), WIDTH))
    hidden = 1 + 0.3 * rng.normal(size=(len(owner), WIDTH))
    whose = CallLabels(tuple(groups), tuple(owners), tuple(turns), tuple(labels))
    sample = CallGradients(owner, hidden.astype(np.float32), gradients.astype(np.float32))
    return sample.kernel(whose.rollouts), whose


def test_within_and_between_are_deviations_from_the_mean_under_all_permutations() -> None:
    rng = np.random.default_rng(5)
    factors = 1 + rng.random((8, 3))
    kernel = factors @ factors.T
    advantages = np.array([2.0, -1.0, -1.0, 0.5, 1.0, 1.0, -2.0, 1.5])
    signal = signal_of(kernel, of_one_call(advantages.tolist(), ["a"] * 4 + ["b"] * 4), rng)
    assert signal is not None
    same = np.arange(8)[:, None] // 4 == np.arange(8)[None] // 4
    orders = [
        np.concatenate([first, second]) for first in permutations(range(4)) for second in permutations(range(4, 8))
    ]
    labels_PC = advantages[np.array(orders, dtype=int)]
    for z, pairs in ((signal.within, same & ~np.eye(8, dtype=bool)), (signal.between, ~same)):
        sums_P = np.einsum("pi,ij,pj->p", labels_PC, np.where(pairs, kernel, 0.0), labels_PC)
        expected = (sums_P[0] - sums_P.mean()) / sums_P.std()
        assert abs(sums_P.mean() / sums_P.std()) > 0.5, "the mean matters"
        assert z == pytest.approx(
            expected, abs=0.15
        )  # of 999 permutations: 6 standard errors of .025 in the worst case


@pytest.mark.ci
def test_rewards_of_single_calls_are_told_from_a_coin_though_they_cancel_over_a_rollout() -> None:
    zs = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        if seed < 5:
            signal = signal_of(*several_calls(rng, informative=True), rng)
            assert signal is not None
            assert signal.p < 0.003
        signal = signal_of(*several_calls(rng, informative=False), rng)
        assert signal is not None
        zs.append(signal.z)
    assert abs(np.mean(zs)) < 0.2
    assert 0.8 < np.std(zs) < 1.2


def test_rewards_of_what_was_sampled_are_told_from_a_coin() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        signal = signal_of(*rollouts(rng, informative=True), rng)
        assert signal is not None
        assert signal.within > 5
        assert signal.between > 5
        assert signal.p < 0.003


def test_a_coin_is_no_evidence_at_the_stated_rate() -> None:
    """p is at most .05 in at most 5 % of rounds, as it must be, though it tests twice."""
    ps, zs = [], []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        signal = signal_of(*rollouts(rng, informative=False), rng)
        assert signal is not None
        ps.append(signal.p)
        zs.append(signal.z)
    assert np.mean(np.array(ps) <= 0.05) < 0.1
    assert abs(np.mean(zs)) < 0.2
    assert 0.8 < np.std(zs) < 1.2


def test_groups_without_a_difference_cannot_be_tested() -> None:
    rng = np.random.default_rng(0)
    assert signal_of(np.eye(4), of_one_call([0.0] * 4, "aabb"), rng) is None
    assert signal_of(np.eye(2), of_one_call([1.0, -1.0], "ab"), rng) is None
    pair = np.array([[1.0, 0.5], [0.5, 1.0]])
    assert signal_of(pair, of_one_call([1.0, -1.0], "aa"), rng) is None, "two rollouts have one product in either order"


@pytest.mark.parametrize(("groups", "size", "successes"), [(4, 2, 1), (2, 8, 1), (8, 8, 1)])
def test_few_rollouts_are_no_evidence_either_way(groups: int, size: int, successes: int) -> None:
    """Many permutations give the same sums then; counted in full, they would speak against a signal."""
    zs = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        vectors = rng.normal(size=(groups * size, 6))
        labels = np.concatenate(
            [rng.permutation([1.0] * successes + [0.0] * (size - successes)) for _ in range(groups)]
        )
        names = [f"g{index // size}" for index in range(groups * size)]
        signal = signal_of(vectors @ vectors.T, of_one_call(labels - successes / size, names), rng)
        zs += [] if signal is None else [signal.z]
    assert len(zs) > 150
    assert abs(np.mean(zs)) < 0.25


def test_evidence_adds_up_over_rounds_and_newer_ones_count_more() -> None:
    two, none = Signal(0, 0, NormalDist().cdf(-2)), Signal(0, 0, 0.5)
    assert math.isnan(evidence([NO_SIGNAL]))
    assert evidence([two, NO_SIGNAL]) == pytest.approx(2.0)
    # (2·.8 + 0) / √(.64 + 1), and the other way round
    assert evidence([two, none]) == pytest.approx(1.6 / 1.64**0.5)
    assert evidence([none, two]) == pytest.approx(2 / 1.64**0.5)
    assert evidence([two, two, two]) > 3.0


def test_a_coin_is_named_in_about_half_of_the_runs_and_a_weak_true_judge_in_none() -> None:
    assert 0.25 <= red_runs(20, 0.0) <= 0.75
    assert red_runs(20, 0.175) == 0


def test_evidence_once_reached_is_not_lost_by_rounds_that_say_little() -> None:
    strong, weak = Signal(0, 0, 0.001), Signal(0, 0, 0.5)
    assert math.isnan(best_evidence([NO_SIGNAL]))
    assert evidence([strong, strong, *[weak] * 10]) < 1
    assert best_evidence([strong, strong, *[weak] * 10, NO_SIGNAL]) == evidence([strong, strong]) > 3


def test_the_gate_starts_open_and_closes_only_on_evidence_against_a_signal() -> None:
    none, some = Signal(0, 0, 0.5), Signal(0, 0, NormalDist().cdf(-1.5))
    assert signal_gate([]) == signal_gate([NO_SIGNAL]) == signal_gate([some]) == 1
    # A score of 0 takes 1.5²/2 = 1.125 from the log odds of 3: (1 / (1 + e^-1.875)) / (1 / (1 + e^-3)).
    assert signal_gate([none]) == pytest.approx(0.86704 / 0.95257, abs=1e-4)
    assert signal_gate([none, some]) == pytest.approx(1), "1.5² − 1.125 gives it back"
    assert signal_gate([none] * 3) < 0.5
    assert signal_gate([none] * 1000) == 1e-3
    assert signal_gate([some] * 1000) == 1
