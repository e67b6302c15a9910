"""The verdict on a swap, from log-probabilities, the prefix cache and the kernels' contents."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainspan_schemas.artifacts.checkpoint import Canary, CanaryPrompt
from trainspan_serving.swap.canary import CanaryReport, Loaded, cache_prompt, judge

RNG = np.random.default_rng(0)
PARENT = (-RNG.exponential(3.0, 192)).tolist()
MOVED = [value + change for value, change in zip(PARENT, RNG.normal(0, 0.08, 192), strict=True)]
HARDLY_MOVED = [value + change for value, change in zip(PARENT, RNG.normal(0, 0.002, 192), strict=True)]
NOISE = RNG.normal(0, 0.05, 192)
"""Noise as in bfloat16: at most 0.15."""


def canary(new: list[float], parent: list[float], dtype: str = "float32") -> Canary:
    return Canary(dtype, [CanaryPrompt([1], [2] * len(new), new, parent)])


def verdict(
    canary: Canary,
    scored: list[float],
    cached: int = 0,
    loaded: Loaded | None = None,
    *,
    tolerance: float | None = None,
    dtype: str = "float32",
) -> CanaryReport:
    return judge(canary, [scored], cached, loaded, tolerance=tolerance, dtype=dtype)


def noisy(scores: list[float]) -> list[float]:
    return [value + noise for value, noise in zip(scores, NOISE, strict=True)]


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
def test_in_float32_every_token_must_agree_up_to_rounding(scored: list[float], status: str) -> None:
    assert verdict(canary([-1.0, -20.0], [-1.5, -20.0]), scored).status == status


def test_barely_changed_weights_are_verified_only_by_the_kernels() -> None:
    report = verdict(canary([-1.0], [-1.00005]), [-1.0])
    assert report.status == "inconclusive"
    assert report.max_abs_change == pytest.approx(5e-5)
    assert verdict(canary([-1.0], [-1.00005]), [-1.0], loaded=Loaded(272, (), 0)).status == "fresh"


@pytest.mark.parametrize(
    ("dtype", "trainer"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_in_bfloat16_noise_far_above_1e_4_is_accepted_and_the_parents_weights_are_not(dtype: str, trainer: str) -> None:
    moved = canary(MOVED, PARENT, trainer)
    fresh, stale = (verdict(moved, noisy(scores), dtype=dtype) for scores in (MOVED, PARENT))
    assert fresh.status == "fresh"
    assert fresh.max_abs_diff is not None
    assert fresh.max_abs_diff > 0.1
    assert fresh.shift == pytest.approx(1, abs=0.1)
    assert stale.status == "stale"
    assert stale.shift == pytest.approx(0, abs=0.1)
    assert "closer to the parent's" in str(stale.evidence)


@pytest.mark.parametrize(
    ("loaded", "status"),
    [
        (None, "inconclusive"),
        (Loaded(270, (), 2), "inconclusive"),
        (Loaded(272, (), 0), "fresh"),
        (Loaded(271, ("model.embed_tokens.weight",), 0), "stale"),
    ],
)
def test_a_small_update_in_bfloat16_is_decided_by_the_kernels(loaded: Loaded | None, status: str) -> None:
    for scores in (HARDLY_MOVED, PARENT):
        report = verdict(canary(HARDLY_MOVED, PARENT), noisy(scores), loaded=loaded, dtype="bfloat16")
        assert report.status == status
    assert report.shift_error is not None
    assert report.shift_error > 0.5


def test_a_tensor_that_is_not_the_checkpoints_is_stale_however_well_the_scores_agree() -> None:
    report = verdict(canary(MOVED, PARENT), MOVED, loaded=Loaded(271, ("lm_head.weight",), 0))
    assert (report.status, report.tensors_differing) == ("stale", 1)
    assert "first 'lm_head.weight'" in str(report.evidence)


def test_scores_that_are_far_off_are_stale_whatever_the_kernels_hold() -> None:
    whole = Loaded(272, (), 0)
    off = [value - 0.3 for value in MOVED]
    assert verdict(canary(MOVED, PARENT), off, loaded=whole, dtype="bfloat16").status == "stale"
    assert verdict(canary(MOVED, PARENT), [math.nan, *MOVED[1:]], loaded=whole, dtype="bfloat16").status == "stale"


def test_the_users_limit_applies_to_the_mean_in_every_dtype() -> None:
    moved = canary(MOVED, PARENT)
    for dtype in ("float32", "bfloat16"):
        assert verdict(moved, noisy(MOVED), dtype=dtype, tolerance=0.1).status == "fresh"
        assert verdict(moved, noisy(MOVED), dtype=dtype, tolerance=0.01).status == "stale"


def test_a_prompt_from_the_earlier_weights_cache_is_stale_however_well_the_scores_agree() -> None:
    report = verdict(canary([-1.0], [-3.0]), [-1.0], 128, Loaded(272, (), 0))
    assert (report.status, report.max_abs_diff, report.cached_tokens) == ("stale", 0.0, 128)


def engine(block: int, context: int) -> Any:
    return SimpleNamespace(cache_block_tokens=block, limits=SimpleNamespace(max_tokens=context))


def test_the_prompt_for_the_cache_fills_one_block_and_begins_unlike_the_scored_sequences() -> None:
    sequences = Canary("float32", [CanaryPrompt([1, 2], [3], [0.0], [0.0]), CanaryPrompt([1, 4], [5], [0.0], [0.0])])
    assert cache_prompt(sequences, engine(4, 100)) == [5, 4, 1, 3, 2]
    assert cache_prompt(sequences, engine(8, 100)) == [5, 4, 1, 3, 2, 1, 5, 4, 1], "few tokens are repeated"
    assert cache_prompt(sequences, engine(8, 5)) == [5, 4, 1, 3], "the context has room for one more token"
