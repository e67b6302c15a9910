"""Micro-batches of rows with very different lengths: how full they are, and how evenly processes share them."""

from typing import Any

import numpy as np
import pytest

from trainspan_training.data.bins import fill
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.sequences import Sampled, TokenSequence

PAIR, CALL = 3e-4, 0.6
"""Of SmolLM2-135M: hidden 576, inner 1536."""


def lognormal_rows(seed: int, spread: float, median: int = 500, count: int = 256) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(median), spread, count), 16, 4096).astype(int)
    return [row_of(index, length, rng) for index, length in enumerate(lengths)]


def row_of(index: int, length: int, rng: Any, vocabulary: int = 49_152, trained: int | None = None) -> TokenSequence:
    """A rollout of one row; by default half of it is trained."""
    trained = length // 2 if trained is None else trained
    sampled = Sampled(index, length - trained, np.zeros(trained, dtype=np.float32), advantage=1.0, temperature=1.0)
    return TokenSequence(str(index), "g", rng.integers(3, vocabulary, length).astype(np.int32), (sampled,))


@pytest.mark.parametrize("blocks", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("tokens", [4096, 8192, 16_384])
@pytest.mark.parametrize("spread", [0.4, 0.8, 1.2])
def test_256_lognormal_rows_need_at_most_a_fifth_more_than_the_fewest_micro_batches(
    spread: float, tokens: int, blocks: bool
) -> None:
    """The lower bound is the total tokens over a micro-batch's tokens, rounded up."""
    rows = lognormal_rows(0, spread)
    total = sum(len(row.tokens) for row in rows)
    cuts = BatchLayout("auto", tokens, pair=PAIR, blocks=blocks, call=0.0 if blocks else CALL).micro_batches(rows)
    assert len(cuts) <= 1.2 * -(-total // tokens)
    assert sum(cut.tokens for cut in cuts) <= total
    assert all(cut.size < tokens + 128 for cut in cuts)


def test_models_that_take_padded_rows_only_pad_if_a_pass_would_cost_more() -> None:
    """The cut is the cheapest of all contiguous ones by length, found here by trying them all."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        lengths = sorted(rng.integers(1, 900, 9).tolist(), reverse=True)
        rows = [row_of(index, length, rng) for index, length in enumerate(lengths)]
        cuts = BatchLayout("padded", 2000, pair=0.0, blocks=False).micro_batches(rows)
        assert sum(256 + cut.size for cut in cuts) == min(_every_cost(lengths, 2000, 256))


def _every_cost(lengths: list[int], limit: int, a_pass: int) -> list[int]:
    if not lengths:
        return [0]
    found = []
    for size in range(1, len(lengths) + 1):
        if size == 1 or size * lengths[0] <= limit:
            found += [a_pass + size * lengths[0] + rest for rest in _every_cost(lengths[size:], limit, a_pass)]
    return found


@pytest.mark.parametrize("processes", [2, 3, 8])
@pytest.mark.parametrize("mode", ["packed", "tree"])
def test_processes_get_micro_batches_of_about_the_same_size(processes: int, mode: str) -> None:
    rows = lognormal_rows(2, 0.8)
    cuts = BatchLayout(mode, 8192, pair=0.0, blocks=True, processes=processes).micro_batches(rows)
    assert len(cuts) % processes == 0
    sizes = [cut.tokens for cut in cuts]
    assert max(sizes) <= 8192
    assert max(sizes) < 1.1 * min(sizes)


def test_bins_hold_everything_once_and_no_more_than_the_limit() -> None:
    """7 4 3 3 2 1 in bins of 10: 7+3, 4+3+2+1. A size above the limit gets its own bin."""
    assert sorted(sorted(chosen) for chosen in fill([7, 4, 3, 3, 2, 1], 10)) == [[0, 3], [1, 2, 4, 5]]
    assert fill([], 10) == []
    assert sorted(fill([50, 1, 1], 10)) == [[0], [1, 2]]
    assert len(fill([5, 5], 10, multiple=2)) == 2
