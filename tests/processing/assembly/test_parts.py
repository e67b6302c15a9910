"""Laws of the files' borders, which are known before any token is read."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspan_processing.assembly import parts
from trainspan_processing.assembly.parts import plan_parts
from trainspan_processing.read import tokens

_FILE, _CHUNK = 20, 8


def _compared(sound: list[int]) -> pl.DataFrame:
    count = len(sound)
    return pl.DataFrame(
        {
            "rollout": pl.Series(range(count), dtype=pl.UInt32),
            "in_part": pl.Series(range(count), dtype=pl.UInt32),
            "part": pl.Series([0] * count, dtype=pl.UInt32),
            "run_id": ["run"] * count,
            "round": pl.Series([0] * count, dtype=pl.Int32),
            "task_id": ["task"] * count,
            "rollout_id": [f"{number:04d}" for number in range(count)],
            "attempt": pl.Series([0] * count, dtype=pl.Int32),
            "reward": pl.Series([1.0] * count, dtype=pl.Float64),
            "sound": pl.Series(sound, dtype=pl.UInt32),
            "tokens": pl.Series([10 * calls for calls in sound], dtype=pl.UInt32),
        }
    )


def _advantages(sound: list[int]) -> pl.DataFrame:
    rows = [(rollout, call) for rollout, calls in enumerate(sound) for call in range(calls)]
    return pl.DataFrame(rows, schema={"rollout": pl.UInt32, "position": pl.UInt32}, orient="row")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CALLS_PER_FILE", _FILE)
    monkeypatch.setattr(tokens, "CALLS_PER_CHUNK", _CHUNK)


@given(st.lists(st.integers(0, 30), max_size=60), st.randoms())
@settings(deadline=None, max_examples=150)
def test_files_divide_the_sound_calls_in_order_whatever_the_order_of_their_advantages(sound: list[int], random) -> None:  # type: ignore[no-untyped-def]
    advantages = _advantages(sound)
    order = list(range(advantages.height))
    random.shuffle(order)
    plans = list(plan_parts(_compared(sound), advantages[order]))
    assert [plan.number for plan in plans] == list(range(len(plans)))
    rollouts = [rollout for plan in plans for rollout in plan.rollouts["rollout"].to_list()]
    assert rollouts == [rollout for rollout, calls in enumerate(sound) if calls]
    sizes = [sum(sound[rollout] for rollout in plan.rollouts["rollout"].to_list()) for plan in plans]
    assert [plan.advantages.height for plan in plans] == sizes
    assert all(size >= _FILE for size in sizes[:-1])
    for plan in plans:
        *full, last = plan.rollouts["chunk"].unique(maintain_order=True).to_list() or [None]
        before = plan.rollouts.filter(pl.col("chunk").is_in(full))["rollout"].to_list()
        assert sum(sound[rollout] for rollout in before) < _FILE, "the file had reached its size before its last chunk"
        assert last is not None or not rollouts


def test_files_end_with_the_chunk_that_reaches_their_size() -> None:
    """Chunks of at most 8 calls: (5, 3), (8), (7), (2): 8 + 8 + 7 = 23 calls are the first file's, 2 the second's."""
    sound = [5, 3, 0, 8, 7, 2]
    plans = plan_parts(_compared(sound), _advantages(sound))
    assert [plan.rollouts["rollout"].to_list() for plan in plans] == [[0, 1, 3, 4], [5]]


def test_a_dataset_without_sound_calls_has_one_file_without_rollouts() -> None:
    [plan] = plan_parts(_compared([0, 0]), _advantages([0, 0]))
    assert plan.rollouts.is_empty()
    assert plan.advantages.is_empty()
