"""The benchmark for real model sizes, at a small size on the CPU: it runs, and its layouts agree."""

import pytest

from benchmarks.training import accelerator


@pytest.mark.slow
def test_padded_rows_packed_rows_and_prefix_trees_are_the_same_step() -> None:
    (size,) = accelerator.SMALL.values()
    padded, packed, tree = (
        accelerator.run(size, accelerator.SMALL_WORK, way, cuda=False) for way in ("padded", "packed", "tree")
    )
    for other in (packed, tree):
        assert other["loss"] == pytest.approx(padded["loss"], rel=1e-5)
    assert packed["forwarded_tokens"] == padded["forwarded_tokens"]
    assert (padded["branched"], tree["branched"]) == (False, True)
    # a larger tree costs attention: a prompt may be forwarded twice
    assert tree["unique_tokens"] <= tree["forwarded_tokens"] < padded["forwarded_tokens"]
    # 2 tasks of 4 rollouts: a prompt of 48, then 3 answers of 8 and 2 observations of 8 each
    assert padded["forwarded_tokens"] == 8 * (48 + 3 * 8 + 2 * 8)
    assert padded["trained_tokens"] == 8 * 3 * 8
    assert all(figures["forwarded_tokens_per_second"] > 0 for figures in (padded, packed, tree))
