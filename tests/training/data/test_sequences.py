"""Calls → rows → steps, with values worked by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import DatasetError, TrainingError
from trainspan_training.data.dataset import Call
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import find_rule
from trainspan_training.data.sequences import ChatTurns, TokenSequence, make_sequences
from trainspan_training.data.steps import Step, plan_steps


def call(
    prompt: list[int],
    completion: list[int],
    *,
    rollout: str = "r/0",
    group: str = "g",
    segment: int = 0,
    position: int = 0,
    advantage: float = 1.0,
    temperature: float = 1.0,
) -> Call:
    logprobs = np.array([-token / 10 for token in completion], dtype=np.float32)
    ids = [np.array(values, dtype=np.int32) for values in (prompt, completion)]
    return Call(0, rollout, position, segment, position, group, 0, ids[0], ids[1], logprobs, temperature, advantage)


def numbered(calls: list[Call]) -> list[Call]:
    """Numbers calls as the rows of a dataset."""
    return [dataclasses.replace(one, number=number) for number, one in enumerate(calls)]


def plan(
    calls: list[Call],
    *,
    steps: int = 1,
    tokens: int = 10_000,
    mode: str = "padded",
    rng: int = 0,
    merge: bool = True,
    rank: int = 0,
    processes: int = 1,
    **settings: Any,
) -> list[Step]:
    calls = numbered(calls)
    rows = make_sequences(calls, merge=merge)
    planned = plan_steps(
        rows,
        calls,
        steps=steps,
        rule=find_rule(TrainSettings(**settings)),
        layout=BatchLayout(mode, tokens, pair=0.0, blocks=False),
        rng=np.random.default_rng(rng),
    )
    return [step.share(rank, processes).build(rows) for step in planned]


def trained(row: TokenSequence) -> list[bool]:
    return [place in row.positions for place in range(len(row.tokens))]


def test_a_segment_becomes_one_row_whose_environment_tokens_are_not_trained() -> None:
    (row,) = make_sequences(
        numbered(
            [
                call([1, 2], [3, 4], advantage=0.5),
                call([1, 2, 3, 4, 9, 9], [5], position=1, advantage=-2.0, temperature=0.5),
            ]
        ),
        merge=True,
    )
    assert row.tokens.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert row.positions.tolist() == [2, 3, 6]
    assert row.calls.tolist() == [0, 0, 1]
    assert row.logprobs.tolist() == pytest.approx([-0.3, -0.4, -0.5])
    assert row.advantages.tolist() == [0.5, 0.5, -2]
    assert row.temperatures.tolist() == [1, 1, 0.5]


def test_negative_advantages_are_scaled_and_others_are_not() -> None:
    calls = [
        call([1], [2], advantage=-2.0),
        call([1, 2], [3], position=1, advantage=2.0),
        call([9], [4], segment=1, advantage=0.0),
    ]
    for merge in (True, False):
        rows = make_sequences(calls, merge=merge, negative_weight=0.25)
        assert np.concatenate([row.advantages for row in rows]).tolist() == [-0.5, 2.0, 0.0]
    assert calls[0].advantage == -2.0


def test_without_merging_each_call_is_a_row() -> None:
    rows = make_sequences([call([1, 2], [3, 4]), call([1, 2, 3, 4, 9], [5], position=1)], merge=False)
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 4, 9, 5]]
    assert [row.n_trained for row in rows] == [2, 1]


def test_interleaved_segments_of_a_rollout_stay_apart_and_are_ordered_by_position() -> None:
    rows = make_sequences(
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
    """The second of three calls was not trainable: its tokens are in the third one's prompt."""
    (row,) = make_sequences([call([1], [2]), call([1, 2, 5, 6, 7], [8], position=2)], merge=True)
    assert row.tokens.tolist() == [1, 2, 5, 6, 7, 8]
    assert trained(row) == [False, True, False, False, False, True]


@pytest.mark.parametrize("prompt", [[1, 2, 4, 9], [1, 2]], ids=["another token", "too short"])
def test_a_prompt_that_does_not_continue_its_segment_is_an_error(prompt: list[int]) -> None:
    with pytest.raises(DatasetError, match=r"call 1 of rollout r/0 does not continue its segment 0"):
        make_sequences([call([1, 2], [3]), call(prompt, [5], position=1)], merge=True)


def test_weights_make_every_rollout_count_the_same() -> None:
    """R = 2, N = 4: rollout a has 1 token, weight 4/(2·1) = 2; rollout b has 3, weight 4/(2·3) = 2/3."""
    (batch,) = plan([call([1], [2], rollout="a", advantage=3.0), call([1], [2, 3, 4], rollout="b")])[0].micro_batches
    assert batch.n_step == 4
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
    assert batch.targets.tolist() == [2, 3, 4, 2]
    assert batch.predicting.tolist() == [0, 1, 2, 4]
    assert batch.weights.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])
    assert batch.advantages.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 6.0])


def test_a_rollout_of_several_rows_counts_once() -> None:
    """R = 2, N = 4; rollout a has two rows of 1 and 2 tokens: each token weighs 4/(2·3)."""
    calls = [call([1], [2], rollout="a"), call([5], [6, 7], rollout="a", segment=1), call([1], [2], rollout="b")]
    (batch,) = plan(calls)[0].micro_batches
    assert sorted(batch.advantages.tolist()) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])


def test_token_weights_leave_advantages_as_they_are() -> None:
    calls = [call([1], [2], rollout="a", advantage=3.0), call([1], [2, 3, 4], rollout="b")]
    (batch,) = plan(calls, weights="token")[0].micro_batches
    assert sorted(batch.advantages.tolist()) == pytest.approx([1, 1, 1, 3])


def test_constant_weights_divide_each_rollout_by_the_same_length() -> None:
    """R = 2, N = 4, L = 8: each token weighs 4/(2·8)."""
    calls = [call([1], [2], rollout="a", advantage=3.0), call([1], [2, 3, 4], rollout="b")]
    (batch,) = plan(calls, weights="const", const_tokens=8)[0].micro_batches
    assert sorted(batch.advantages.tolist()) == pytest.approx([0.25, 0.25, 0.25, 0.75])


def test_a_function_of_ones_own_weights_the_calls(tmp_path: Path) -> None:
    """It gets rollout, index, tokens and advantage, and doubles each rollout's first call: 1/5 each, N = 5."""
    module = tmp_path / "rules.py"
    module.write_text(
        "def first_counts_double(calls):\n"
        "    total = sum(call.tokens for call in calls)\n"
        "    return [(2 if call.index == 0 else 1) / total for call in calls]\n"
        "def negative(calls):\n    return [-1.0] * len(calls)\n"
        "def short(calls):\n    return []\n"
    )
    calls = [call([1], [2, 3]), call([1, 2, 3], [4], position=1), call([1], [5, 6], rollout="s/0")]
    (batch,) = plan(calls, weights=f"{module}:first_counts_double")[0].micro_batches
    assert dict(zip(batch.targets.tolist(), batch.weights.tolist(), strict=True)) == pytest.approx(
        {2: 2, 3: 2, 4: 1, 5: 2, 6: 2}
    )
    with pytest.raises(TrainingError, match=r"returned -1.0: weights must be finite and not negative"):
        plan(calls, weights=f"{module}:negative")
    with pytest.raises(TrainingError, match=r"returned 0 numbers for 3 calls"):
        plan(calls, weights=f"{module}:short")


def test_the_order_of_groups_follows_the_seed() -> None:
    calls = [call([1], [index + 2], rollout=str(index), group=str(index // 2)) for index in range(20)]

    def order(seed: int) -> list[Any]:
        return [step.micro_batches[0].tokens.tolist() for step in plan(calls, steps=5, rng=seed)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_rollouts_of_a_group_are_in_one_step_if_the_number_of_steps_allows() -> None:
    calls = [call([1], [index + 2], rollout=str(index), group=str(index % 3)) for index in range(12)]
    for step in plan(calls, steps=3):
        (batch,) = step.micro_batches
        assert len({int(target) % 3 for target in batch.targets}) == 1


def test_a_row_longer_than_the_budget_is_a_micro_batch_of_its_own() -> None:
    calls = [call([1], [2] * 50, rollout="a"), call([1], [2, 3], rollout="b")]
    for mode in ("padded", "packed", "tree"):
        shapes = [batch.tokens.shape for batch in plan(calls, tokens=10, mode=mode)[0].micro_batches]
        assert sorted(shapes, reverse=True) == [(1, 51), (1, 3)]


def test_the_first_rows_of_a_micro_batch_keep_their_values() -> None:
    calls = [call([1, 1, 1 + index], [5, 6], rollout=str(index), advantage=index) for index in range(4)]
    (batch,) = plan(calls, weights="token")[0].micro_batches
    half = batch.first(12)
    assert (half.tokens.tolist(), half.n_step) == (batch.tokens[:2].tolist(), batch.n_step)
    assert half.advantages.tolist() == pytest.approx([value for row in half.tokens for value in [row[2] - 1.0] * 2])
    assert batch.first(1).tokens.shape == (1, 5)
    assert batch.first(1000).tokens.shape == (4, 5)


def test_no_rows_give_no_steps() -> None:
    assert plan([]) == []


def test_a_prefix_tree_holds_each_shared_token_once() -> None:
    """1 2 3 | 4 5, 1 2 3 | 4 6, 1 2 7 | 8: the tree is 1 2 (3 (4 (5) (6))) (7 (8)), in this order."""
    calls = [
        call([1, 2, 3], [4, 6], rollout="b", advantage=2.0),
        call([1, 2, 7], [8], rollout="c", advantage=3.0),
        call([1, 2, 3], [4, 5], rollout="a"),
    ]
    (step,) = plan(calls, mode="tree", weights="token")
    (batch,) = step.micro_batches
    assert batch.branches is not None
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.branches.depths.tolist() == [0, 1, 2, 3, 4, 4, 2, 3]
    assert batch.branches.ends.tolist() == [8, 8, 6, 6, 5, 6, 8, 8]
    assert batch.targets.tolist() == [4, 5, 4, 6, 8], "a token that two rollouts sampled is trained for each"
    assert batch.predicting.tolist() == [2, 3, 2, 3, 6]
    assert batch.advantages.tolist() == pytest.approx([1, 1, 2, 2, 3])
    assert (step.trained, step.forwarded, step.unique, step.padded) == (5, 8, 8, 8)
    assert plan(calls)[0].forwarded == 14
    assert plan(calls)[0].unique == 8


def test_the_cheaper_of_padded_rows_and_tree_is_chosen() -> None:
    alike = [call([1] * 50, [index], rollout=str(index)) for index in range(8)]
    apart = [call([index] * 50, [1], rollout=str(index)) for index in range(8)]
    for calls, branched in ((alike, True), (apart, False)):
        (batch, *_) = plan(calls, mode="auto")[0].micro_batches
        assert (batch.branches is not None) is branched


def test_every_process_gets_as_many_micro_batches() -> None:
    calls = [call([1], [2] * 9, rollout=str(index)) for index in range(5)]
    shares = [share for rank in range(2) for share in plan(calls, tokens=20, rank=rank, processes=2)]
    assert [len(share.micro_batches) for share in shares] == [2, 2]
    assert sum(len(batch.targets) for share in shares for batch in share.micro_batches) == shares[0].trained == 45
    assert shares[1].micro_batches[1].tokens.shape == (1, 1)
    assert len(shares[1].micro_batches[1].targets) == 0


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=4), max_size=12),
    steps=st.integers(1, 6),
    budget=st.integers(1, 400),
    mode=st.sampled_from(["padded", "packed", "tree"]),
)
def test_each_sampled_token_is_trained_once_and_rollouts_stay_whole(
    lengths: list[list[tuple[int, int]]], steps: int, budget: int, mode: str
) -> None:
    """Every completion token has a unique number, so that it can be identified."""
    calls, number = [], 1000
    for rollout, turns in enumerate(lengths):
        for segment, (prompt, completion) in enumerate(turns):
            ids = list(range(number, number + completion))
            calls.append(call([rollout] * prompt, ids, rollout=str(rollout), segment=segment))
            number += completion
    planned = plan(calls, steps=steps, tokens=budget, mode=mode)
    seen: list[int] = []
    for step in planned:
        batches = step.micro_batches
        assert sum(len(batch.targets) for batch in batches) == step.trained == batches[0].n_step
        assert sum(batch.tokens.size for batch in batches) == step.padded
        assert step.unique <= step.forwarded <= step.padded
        assert all(batch.tokens.size <= budget or len(batch.tokens) == 1 for batch in batches)
        seen += [int(token) for batch in batches for token in batch.targets]
    assert sorted(seen) == list(range(1000, number))
    homes = [{calls[index].rollout for b in step.micro_batches for index in b.calls.tolist()} for step in planned]
    assert sum(len(home) for home in homes) == len(lengths) == len(set().union(*homes))
    assert max((len(home) for home in homes), default=0) - min((len(home) for home in homes), default=0) <= 1


TURNS = ChatTurns(np.array([8, 9], dtype=np.int32), frozenset({0}))


def test_observations_are_what_is_written_between_an_answer_and_the_next_turn_of_the_assistant() -> None:
    calls, tokens = list[Call](), [8, 9, 1, 8, 9]
    for between in (
        [],
        [5, 6, 7, 8, 9],
        [6, 8, 9, 4, 5, 8, 9],  # another answer is inside
        [8, 8, 5],  # no turn of the assistant opens
        [9],
        [8, 9],
    ):
        tokens = [*tokens, *between]
        calls.append(call(tokens, [2, 0], position=len(calls)))
        tokens = [*tokens, 2, 0]
    (row,) = make_sequences(calls, merge=True, turns=TURNS)
    assert row.tokens[row.observed].tolist() == [5, 6, 7, 6]
    assert row.observed.tolist() == [7, 8, 9, 14]
    assert row.unobserved == 4 + 3 + 1
    assert all(len(one.observed) == 0 for one in make_sequences(calls, merge=False, turns=TURNS))
    assert len(make_sequences(calls, merge=True)[0].observed) == 0


@pytest.mark.parametrize(
    ("between", "observed", "unobserved"),
    [
        ([0, 5, 6, 8, 9], [5, 6], 1),  # the template ended the turn of the answer that was cut
        ([5, 6, 0, 5, 8, 9], [], 6),  # somebody went on with it
        ([0, 8, 9], [], 1),
        ([8, 9], [], 2),
        ([], [], 0),
    ],
)
def test_nothing_that_goes_on_with_an_answer_that_was_cut_is_an_observation(
    between: list[int], observed: list[int], unobserved: int
) -> None:
    calls = [call([8, 9], [2, 3]), call([8, 9, 2, 3, *between], [2, 0], position=1)]
    (row,) = make_sequences(calls, merge=True, turns=TURNS)
    assert (row.tokens[row.observed].tolist(), row.unobserved) == (observed, unobserved)


@pytest.mark.parametrize("mode", ["padded", "tree"])
def test_observations_have_the_mean_over_rollouts_of_the_mean_over_their_tokens(mode: str) -> None:
    """Also those of a rollout in two rows; a rollout without any counts in the first mean. Shared ones are scored once."""
    calls = numbered(
        [
            call([1, 9], [2]),
            call([1, 9, 2, 5, 6, 7, 9], [3], position=1),
            call([4, 9], [2], segment=1),
            call([4, 9, 2, 5, 9], [3], segment=1, position=1),
            call([1, 9], [2], rollout="r/1"),
            call([1, 9, 2, 5, 6, 9], [3], rollout="r/1", position=1),
            call([1, 9], [2], rollout="r/2"),
        ]
    )
    turns = ChatTurns(np.array([9], dtype=np.int32), frozenset({2}))
    rows = make_sequences(calls, merge=True, turns=turns)
    layout = BatchLayout(mode, 10_000, pair=0.0, blocks=False)
    rule, rng = find_rule(TrainSettings()), np.random.default_rng(0)
    (step,) = plan_steps(rows, calls, steps=1, rule=rule, layout=layout, rng=rng)
    assert dict(step.observation_weights) == {0: 1 / (3 * 4), 2: 1 / (3 * 4), 4: 1 / (3 * 2)}
    (batch,) = step.build(rows).micro_batches
    seen = batch.observations
    assert seen is not None
    found = zip(seen.targets.tolist(), seen.counts.tolist(), np.round(seen.weights, 6).tolist(), strict=True)
    if mode == "tree":
        assert sorted(found) == [(5, 1, 0.083333), (5, 2, 0.25), (6, 2, 0.25), (7, 1, 0.083333)]
    else:
        assert sorted(found) == [
            *[
                (5, 1, 0.083333),
                (5, 1, 0.083333),
                (5, 1, 0.166667),
                (6, 1, 0.083333),
                (6, 1, 0.166667),
                (7, 1, 0.083333),
            ]
        ]
    before = zip(batch.tokens.flatten()[seen.predicting].tolist(), seen.targets.tolist(), strict=True)
    assert set(before) == {(2, 5), (5, 6), (6, 7)}
    assert batch.first(1).observations is None
