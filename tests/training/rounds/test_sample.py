"""The sample on which agreement and movement are measured, and the sizes with which a lost round is repeated."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.training.data.test_shared_prefixes import planned, rows_of
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.micro_batches import WeightedRow, make_batches
from trainspan_training.data.sequences import TokenSequence
from trainspan_training.devices.team import Team
from trainspan_training.objective.off_policy import OffPolicySums
from trainspan_training.rounds.missing_state import MissingState
from trainspan_training.rounds.old_policy import Prepared, sample_of


def _step(rows: list[TokenSequence], **settings: Any) -> Any:
    weighted = [WeightedRow(row, np.ones(row.n_trained)) for row in rows]
    made = make_batches(planned(rows, cuda=True, **settings), weighted, sum(row.n_trained for row in rows))
    return SimpleNamespace(micro_batches=tuple(made))


def test_a_sample_is_no_whole_tree_where_other_rows_are_short() -> None:
    tree = rows_of([(0, 0, 9_000), (0, 8_000, 4_000), (0, 8_500, 5_000)], "long")
    short = rows_of([(0, 0, 700)] * 12, "short", seed=1)
    short = [
        TokenSequence(f"short-{number}", "g", np.append(row.tokens, number).astype(np.int32), row.sampled)
        for number, row in enumerate(short)
    ]
    step = _step([*tree, *short], forward="tree")
    assert max(batch.tokens.size for batch in step.micro_batches) >= 16_384
    ((sample,),) = sample_of([step], Team())
    assert 1_000 < sample.tokens.size <= 4_096


def test_a_sample_of_nothing_but_trees_is_the_first_tree_that_is_smallest() -> None:
    step = _step(rows_of([(0, 0, 9_000), (0, 8_000, 4_000)]), forward="tree")
    ((sample,),) = sample_of([step, step], Team())
    assert sample.tokens.size == 13_056, "13,000 in whole blocks"


@pytest.mark.parametrize(("rows", "length", "steps"), [(26, 30, 1), (10, 30, 3), (1, 30, 12), (1, 1_500, 3)])
def test_the_sample_of_small_steps_goes_back_to_earlier_ones(rows: int, length: int, steps: int) -> None:
    """Each row has 20 trained tokens."""
    made = [
        _step([rows_of([(0, 0, length)], f"{number}-{row}", 100 * number + row)[0] for row in range(rows)])
        for number in range(12)
    ]
    sample = sample_of(made, Team())
    assert [batch.tokens.tolist() for (batch,) in sample] == [
        step.micro_batches[0].tokens.tolist() for step in made[: -steps - 1 : -1]
    ]


@pytest.mark.parametrize("per_batch", [1, 5, 20])
def test_the_size_of_micro_batches_does_not_decide_how_many_tokens_are_sampled(per_batch: int) -> None:
    """40 rows of 20 trained tokens: 26 rows are 520, and another step is not asked for."""
    rows = [
        TokenSequence(f"{number}", "g", row.tokens, row.sampled)
        for number in range(40)
        for row in rows_of([(0, 0, 100)], f"{number}", number)
    ]
    cuts = BatchLayout("padded", per_batch * 100, pair=0.0, blocks=False).micro_batches(rows)
    weighted = [WeightedRow(row, np.ones(row.n_trained)) for row in rows]
    step: Any = SimpleNamespace(micro_batches=tuple(make_batches(cuts, weighted, 800)))
    assert len(step.micro_batches) == 40 // per_batch
    (sample,) = sample_of([step, step], Team())
    assert sum(len(batch.targets) for batch in sample) == {1: 520, 5: 600, 20: 800}[per_batch]


class _Other(Team):
    """The other process has as many micro-batches, of other sizes."""

    def __init__(self, *parts: tuple[int, int]) -> None:
        super().__init__()
        self._parts = list(parts)
        self.size = 2

    def gather(self, value: Any) -> list[Any]:
        return [value, self._parts.pop(0)]


def test_processes_stop_at_the_same_micro_batch_and_skip_the_same_trees() -> None:
    steps = [_step([rows_of([(0, 0, 30)], f"{number}", number)[0]]) for number in range(12)]
    # 20 trained tokens here, 1,004 there: their mean is 512.
    assert len(sample_of(steps, _Other((1_004, 1_100)))) == 1
    assert len(sample_of(steps, _Other((1_003, 1_100), (0, 128)))) == 2
    # The other has nothing but long trees: one of them is taken, and then the next step's.
    assert [len(batches) for batches in sample_of(steps, _Other((10, 5_000)))] == [1]
    two = [SimpleNamespace(micro_batches=step.micro_batches * 2) for step in steps]
    parts = [(10, 50), (10, 5_000), (1_000, 1_000)]
    assert [len(batches) for batches in sample_of(two, _Other(*parts))] == [1, 1]


@pytest.mark.parametrize(("made", "left"), [(0, 3), (9, 3), (11, 1), (12, 1), (24, 1)])
def test_movement_is_measured_on_steps_that_were_not_made_if_there_are_any(made: int, left: int) -> None:
    steps = [_step([rows_of([(0, 0, 30)], f"{number}", number)[0]]) for number in range(12)]
    sample: Any = (("last", "its second"), ("last but one",), ("last but two",))
    unseen = Prepared(tuple(steps), "logged", OffPolicySums(), sample).unseen(made)
    assert unseen == ("last", "its second", "last but one", "last but two")[: left + 1]


@pytest.mark.parametrize(
    ("tokens", "tree", "longest", "expected"),
    [
        (4096, 65_536, 100_000, (4096, 65_536)),
        (4096, None, 100_000, (4096, 4096)),  # written before trees were larger
        (None, None, 100_000, (16_384, 16_384)),
        (4096, 131_072, 100_000, (16_384, 32_768)),
    ],
)
def test_a_round_is_repeated_with_its_own_sizes_or_it_is_said(
    tokens: int | None, tree: int | None, longest: int, expected: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    now = BatchLayout("auto", 16_384, pair=0.0, blocks=True, longest=longest, tree=32_768)
    policy: Any = SimpleNamespace(name="policy-000002")
    layout = MissingState(policy, policy, SimpleNamespace(), tokens, tree).layout(now)  # type: ignore[arg-type]
    assert (layout.tokens, layout.tree) == expected
    assert ("memory has no room for the 131072 tokens" in caplog.text) == (tree == 131_072)
