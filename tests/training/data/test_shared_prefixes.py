"""Segments that share a prefix, in the shapes of coding harnesses: each token is forwarded once, whatever the length."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.data.cuts import Cut, shared, unique_tokens
from trainspan_training.data.layout import TokenBudget, batch_layout
from trainspan_training.data.sequences import Sampled, TokenSequence

Segment = tuple[int, int, int]
"""The segment whose prefix it shares, the number of shared tokens, and the number of its own."""

CELLS: dict[str, tuple[list[Segment], int, int]] = {
    "Claude Code, compaction": ([(0, 0, 45_000), (0, 44_900, 1_700), (0, 20_242, 27_761)], 139_603, 74_461),
    "Codex, compaction": ([(0, 0, 21_000), (0, 4_000, 12_000), (1, 9_575, 9_479)], 56_054, 42_479),
    "OpenCode, compaction and title": (
        [(0, 0, 14_000), (0, 3, 600), (0, 7_600, 9_000), (2, 7_600, 12_000), (0, 218, 11_000), (3, 3, 10_524)],
        72_548,
        57_124,
    ),
    "OpenCode, sub-agent that inherits the prompt": ([(0, 0, 8_400), (0, 5_390, 1_000), (0, 3, 562)], 15_355, 9_962),
    "Codex, sub-agent that inherits the prompt": ([(0, 0, 9_300), (0, 5_568, 1_314)], 16_182, 10_614),
}
"""Segments, tokens of all of them, and unique tokens, as measured with each harness."""


def rows_of(segments: Sequence[Segment], rollout: str = "r", seed: int = 0) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    rows: list[TokenSequence] = []
    for other, common, own in segments:
        begin = rows[other].tokens[:common] if rows else np.zeros(0, dtype=np.int32)
        # The first token of its own differs from all others.
        fresh = np.concatenate([[len(rows)], rng.integers(100, 1000, own - 1)]).astype(np.int32)
        tokens = np.concatenate([begin, fresh])
        sampled = Sampled(len(rows), len(tokens) - 20, np.zeros(20, dtype=np.float32), advantage=1.0, temperature=1.0)
        rows.append(TokenSequence(rollout, "g", tokens, (sampled,)))
    return rows


def planned(
    rows: list[TokenSequence],
    *,
    cuda: bool,
    tree: int = 150_000,
    kept: int = 150_000,
    processes: int = 1,
    **settings: Any,
) -> list[Cut]:
    """At the shape of Qwen2.5-0.5B."""
    from transformers import Qwen2Config

    config = Qwen2Config(hidden_size=896, intermediate_size=4864)
    budget = TokenBudget(tokens=16_384, longest=200_000, tree=tree, kept=kept, logits=2**26)
    layout = batch_layout(TrainSettings(**settings), config, cuda=cuda, budget=budget, processes=processes)
    return layout.micro_batches(rows)


def forwarded(cuts: list[Cut]) -> int:
    return sum(cut.tokens for cut in cuts)


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("cell", CELLS)
def test_the_segments_of_a_harness_forward_each_token_once(cell: str, cuda: bool) -> None:
    """Also those that are longer than a micro-batch, which has 16,384 tokens."""
    segments, total, unique = CELLS[cell]
    rows = rows_of(segments)
    assert sum(len(row.tokens) for row in rows) == total
    assert unique_tokens(rows) == unique
    assert forwarded(planned(rows, cuda=cuda)) == unique
    assert forwarded(planned(rows, cuda=cuda, forward="packed")) == total


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "gpu"])
def test_a_tree_whose_activations_are_recomputed_must_save_more_than_that_costs(cuda: bool) -> None:
    """Forty rows that share the three tokens of a template gain nothing from a pass of 40,000 tokens; a compaction does."""
    rows = rows_of([(0, 0, 1000), *[(0, 3, 997)] * 39])
    cuts = planned(rows, cuda=cuda, kept=30_000)
    assert max(cut.tokens for cut in cuts) <= 16_384
    segments, _, unique = CELLS["Claude Code, compaction"]
    assert forwarded(planned(rows_of(segments), cuda=cuda, kept=30_000)) == unique


def test_a_tree_that_memory_has_no_room_for_is_cut_where_rows_share_least() -> None:
    segments, _, unique = CELLS["Claude Code, compaction"]
    cuts = planned(rows_of(segments), cuda=True, tree=60_000)
    assert sorted(tree.rows for cut in cuts for tree in cut.trees) in ([(0, 1), (2,)], [(1, 0), (2,)])
    assert forwarded(cuts) == unique + 20_242


def test_only_the_rows_of_one_rollout_exceed_a_micro_batch() -> None:
    """Sixteen short rollouts of a task share its prompt as far as micro-batches hold them; a long one is by itself."""
    long = rows_of(CELLS["Claude Code, compaction"][0], "long")
    group = rows_of([(0, 0, 3000), *[(0, 2000, 1000)] * 15])
    group = [TokenSequence(f"short-{index}", "g", row.tokens, row.sampled) for index, row in enumerate(group)]
    long = [numbered(row, 100 + index) for index, row in enumerate(long)]
    cuts = planned([*long, *group], cuda=True)
    sizes = sorted(cut.tokens for cut in cuts)
    assert sizes[-1] == 74_461
    assert sizes[:-1] == [4_000, 16_000], "fourteen rollouts in one micro-batch, the prompt again in the other"
    assert forwarded(cuts) == unique_tokens(long) + unique_tokens(group) + 2000


def numbered(row: TokenSequence, number: int) -> TokenSequence:
    (part,) = row.sampled
    sampled = Sampled(number, part.start, part.logprobs, part.advantage, part.temperature)
    return TokenSequence(row.rollout, row.group, row.tokens, (sampled,))


def test_processes_divide_a_rollout_only_if_all_are_done_earlier() -> None:
    """Three rows of 46,000 tokens: alone, one process would forward two of them, more than the tree's 74,461."""
    segments, _, unique = CELLS["Claude Code, compaction"]
    assert forwarded(planned(rows_of(segments), cuda=True, processes=2)) == unique
    several = [numbered(row, 10 * n + row.number) for n in range(4) for row in rows_of(segments, str(n), seed=n)]
    cuts = planned(several, cuda=True, processes=2)
    assert len(cuts) == 4
    assert forwarded(cuts) == 4 * unique
    apart = rows_of([(0, 0, 15_000), (0, 200, 15_000)])
    assert [cut.tokens for cut in planned(apart, cuda=True, processes=2)] == [15_200, 15_000]


def test_rows_are_cut_at_the_least_total_of_shared_tokens() -> None:
    """Compared with every way to cut eight rows of random shape, in their order."""
    rng = np.random.default_rng(0)
    for seed in range(30):
        segments = [(0, 0, 40)]
        for index in range(7):
            other = int(rng.integers(index + 1))
            length = sum(segments[other][1:])
            segments.append((other, int(rng.integers(1, length)), int(rng.integers(1, 40))))
        rows = [
            TokenSequence(str(index), "g", row.tokens, row.sampled) for index, row in enumerate(short(segments, seed))
        ]
        limit = int(rng.integers(40, 150))
        assert forwarded(shared(rows, limit)) == least(sorted(rows, key=lambda row: row.tokens.tolist()), limit)


def short(segments: Sequence[Segment], seed: int) -> list[TokenSequence]:
    return [
        TokenSequence("r", "g", row.tokens, (Sampled(row.number, len(row.tokens), np.zeros(0, np.float32), 1.0, 1.0),))
        for row in rows_of([(other, common, max(own, 1)) for other, common, own in segments], seed=seed)
    ]


def least(ordered: list[TokenSequence], limit: int) -> int:
    if not ordered:
        return 0
    found = []
    for stop in range(1, len(ordered) + 1):
        size = unique_tokens(ordered[:stop])
        if stop == 1 or size <= limit:
            found.append(size + least(ordered[stop:], limit))
    return min(found)
