"""The canary's sequences: drawn from the data, short, the same each time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.training.support.sessions import Run
from trainspan_schemas.artifacts.checkpoint import Canary
from trainspan_training.data.sequences import TokenSequence
from trainspan_training.rounds.canary import draw_prompts


def rows(lengths: list[int]) -> list[TokenSequence]:
    """Rows with tokens numbered consecutively from 0 across all of them."""
    ends = np.cumsum(lengths)
    return [
        TokenSequence("r/0", "g", np.arange(end - length, end, dtype=np.int32), ())
        for end, length in zip(ends, lengths, strict=True)
    ]


def test_three_short_sequences_start_at_the_beginning_of_a_row() -> None:
    prompts = draw_prompts(rows([100] * 10), 4096, seed=0)
    assert [(len(prompt), len(completion)) for prompt, completion in prompts] == [(24, 64)] * 3
    assert all(prompt[0] % 100 == 0 for prompt, _ in prompts)
    assert len({tuple(prompt) for prompt, _ in prompts}) == 3


@pytest.mark.parametrize(("context", "prompt", "completion"), [(512, 24, 64), (64, 24, 31), (8, 4, 3)])
def test_a_server_has_room_for_one_more_token(context: int, prompt: int, completion: int) -> None:
    first, *_ = draw_prompts(rows([50, 60]), context, seed=0)
    assert (len(first[0]), len(first[1])) == (prompt, completion)
    assert prompt + completion < context


def test_few_tokens_are_repeated_until_the_sequence_is_long_enough() -> None:
    prompts = draw_prompts(rows([3]), 4096, seed=0)
    assert prompts[0][0][:7] == [0, 1, 2, 0, 1, 2, 0]


def test_the_same_rows_and_seed_give_the_same_sequences() -> None:
    data = rows([40, 80, 120, 200])
    assert draw_prompts(data, 4096, seed=1) == draw_prompts(data, 4096, seed=1)
    assert draw_prompts(data, 4096, seed=1) != draw_prompts(data, 4096, seed=2)


def test_the_canary_of_a_later_round_tells_the_weights_from_those_of_the_round_before(
    run: Run, tmp_path: Path, model: Any
) -> None:
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    run(rounds=2)
    first, second = (Canary.read(tmp_path / f"checkpoints/policy-00000{version}").prompts for version in (1, 2))
    assert [prompt.prompt_ids for prompt in second] == [prompt.prompt_ids for prompt in first]
    assert [prompt.logprobs_parent for prompt in second] == [prompt.logprobs_new for prompt in first]
    assert [prompt.logprobs_new for prompt in second] != [prompt.logprobs_new for prompt in first]
