"""Calls → rows → steps, with values worked by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspan_schemas.errors import DatasetError
from trainspan_training.plan import Step, plan_steps
from trainspan_training.rows import Row, make_rows
from trainspan_training.transitions import Call


def call(
    prompt: list[int],
    completion: list[int],
    *,
    rollout: str = "r/0",
    segment: int = 0,
    position: int = 0,
    advantage: float = 1.0,
    temperature: float = 1.0,
) -> Call:
    logprobs = np.array([-token / 10 for token in completion], dtype=np.float32)
    ids = [np.array(values, dtype=np.int32) for values in (prompt, completion)]
    return Call(rollout, position, segment, position, 0, ids[0], ids[1], logprobs, temperature, advantage)


def plan(rows: list[Row], **options: Any) -> list[Step]:
    chosen = {"steps": 1, "weights": "rollout", "micro_batch_tokens": 10_000, "rng": np.random.default_rng(0)} | options
    return plan_steps(rows, **chosen)


def test_a_segment_becomes_one_row_whose_environment_tokens_are_not_trained() -> None:
    (row,) = make_rows(
        [
            call([1, 2], [3, 4], advantage=0.5),
            call([1, 2, 3, 4, 9, 9], [5], position=1, advantage=-2.0, temperature=0.5),
        ],
        merge=True,
    )
    assert row.tokens.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert row.trained.tolist() == [False, False, True, True, False, False, True]
    assert row.logprobs.tolist() == pytest.approx([0, 0, -0.3, -0.4, 0, 0, -0.5])
    assert row.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, -2]
    assert row.temperatures.tolist() == [1, 1, 1, 1, 1, 1, 0.5]


def test_without_merging_each_call_is_a_row() -> None:
    rows = make_rows([call([1, 2], [3, 4]), call([1, 2, 3, 4, 9], [5], position=1)], merge=False)
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 4, 9, 5]]
    assert [row.n_trained for row in rows] == [2, 1]


def test_interleaved_segments_of_a_rollout_stay_apart_and_are_ordered_by_position() -> None:
    rows = make_rows(
        [
            call([1], [2]),
            call([7], [8], segment=1),
            call([7, 8], [9], segment=1, position=1),
            call([1, 2], [3], position=1),
        ],
        merge=True,
    )
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3], [7, 8, 9]]


def test_a_call_that_is_missing_from_a_segment_costs_only_its_own_tokens() -> None:
    """The second of three calls was not trainable: its tokens stand in the third one's prompt."""
    (row,) = make_rows([call([1], [2]), call([1, 2, 5, 6, 7], [8], position=2)], merge=True)
    assert row.tokens.tolist() == [1, 2, 5, 6, 7, 8]
    assert row.trained.tolist() == [False, True, False, False, False, True]


@pytest.mark.parametrize("prompt", [[1, 2, 4, 9], [1, 2]], ids=["another token", "too short"])
def test_a_prompt_that_does_not_continue_its_segment_is_an_error(prompt: list[int]) -> None:
    with pytest.raises(DatasetError, match=r"call 1 of rollout r/0 does not continue its segment 0"):
        make_rows([call([1, 2], [3]), call(prompt, [5], position=1)], merge=True)


def test_weights_make_every_rollout_count_the_same() -> None:
    """R = 2, N = 4: rollout a has 1 token, weight 4/(2·1) = 2; rollout b has 3, weight 4/(2·3) = 2/3."""
    rows = make_rows([call([1], [2], rollout="a", advantage=3.0), call([1], [2, 3, 4], rollout="b")], merge=True)
    (batch,) = plan(rows)[0].micro_batches
    assert batch.n_step == 4
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
    assert batch.advantages.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 6.0])


def test_a_rollout_of_several_rows_counts_once() -> None:
    """R = 2, N = 4; rollout a has two rows of 1 and 2 tokens: each token weighs 4/(2·3)."""
    calls = [call([1], [2], rollout="a"), call([5], [6, 7], rollout="a", segment=1), call([1], [2], rollout="b")]
    (batch,) = plan(make_rows(calls, merge=True))[0].micro_batches
    assert sorted(batch.advantages.tolist()) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])


def test_token_weights_leave_advantages_as_they_are() -> None:
    rows = make_rows([call([1], [2], rollout="a", advantage=3.0), call([1], [2, 3, 4], rollout="b")], merge=True)
    (batch,) = plan(rows, weights="token")[0].micro_batches
    assert sorted(batch.advantages.tolist()) == [1, 1, 1, 3]


def test_the_order_of_rollouts_follows_the_seed() -> None:
    rows = make_rows([call([1], [index + 2], rollout=str(index)) for index in range(20)], merge=True)

    def order(seed: int) -> list[Any]:
        steps = plan(rows, steps=4, rng=np.random.default_rng(seed))
        return [step.micro_batches[0].tokens.tolist() for step in steps]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_row_longer_than_the_budget_is_a_micro_batch_of_its_own() -> None:
    rows = make_rows([call([1], [2] * 50, rollout="a"), call([1], [2, 3], rollout="b")], merge=True)
    assert [batch.tokens.shape for batch in plan(rows, micro_batch_tokens=10)[0].micro_batches] == [(1, 51), (1, 3)]


def test_the_first_rows_of_a_micro_batch_keep_their_values() -> None:
    rows = make_rows(
        [call([1, 1, 1 + index], [5, 6], rollout=str(index), advantage=index) for index in range(4)], merge=True
    )
    (batch,) = plan(rows, weights="token")[0].micro_batches
    half = batch.first(12)
    assert (half.tokens.tolist(), half.n_step) == (batch.tokens[:2].tolist(), batch.n_step)
    assert half.advantages.tolist() == [value for tokens in half.tokens for value in [tokens[2] - 1.0] * 2]
    assert batch.first(1).tokens.shape == (1, 5)
    assert batch.first(1000).tokens.shape == (4, 5)


def test_no_rows_give_no_steps() -> None:
    assert plan([]) == []


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=4), max_size=12),
    steps=st.integers(1, 6),
    budget=st.integers(1, 400),
)
def test_each_sampled_token_is_trained_once_and_rollouts_stay_whole(
    lengths: list[list[tuple[int, int]]], steps: int, budget: int
) -> None:
    """Every completion token carries a number of its own, so that it can be found again."""
    calls, number = [], 1000
    for rollout, turns in enumerate(lengths):
        for segment, (prompt, completion) in enumerate(turns):
            ids = list(range(number, number + completion))
            calls.append(call([rollout] * prompt, ids, rollout=str(rollout), segment=segment))
            number += completion
    planned = plan(make_rows(calls, merge=True), steps=steps, micro_batch_tokens=budget)
    seen: list[int] = []
    for step in planned:
        batches = step.micro_batches
        assert sum(int(batch.trained.sum()) for batch in batches) == step.trained == batches[0].n_step
        assert sum(batch.tokens.size for batch in batches) == step.padded
        assert sum(int(batch.lengths.sum()) for batch in batches) == step.forwarded
        assert all(batch.tokens.size <= budget or len(batch.tokens) == 1 for batch in batches)
        seen += [int(token) for batch in batches for token in batch.tokens[batch.trained]]
    assert sorted(seen) == list(range(1000, number))
    homes = [{int(row[0]) for batch in step.micro_batches for row in batch.tokens} for step in planned]
    assert sum(len(home) for home in homes) == len(lengths) == len(set().union(*homes))
    assert max((len(home) for home in homes), default=0) - min((len(home) for home in homes), default=0) <= 1
