"""Which steps of a round are made: passes over them, and the end where the policy has moved to `target_kl`."""

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.training.support.sessions import GENTLE, Run
from trainspan_schemas.artifacts.trained_tokens import parts

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.ci]


def test_a_round_ends_where_its_policy_has_moved_to_the_target(run: Run, tmp_path: Path, model: Any) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=8))
    fast = dataclasses.replace(GENTLE, learning_rate=4e-4, max_kl=1e9, rollouts_per_step=1, passes=2)
    (free,) = run(fast, checkpoints=tmp_path / "free")
    (limited,) = run(dataclasses.replace(fast, target_kl=0.02), checkpoints=tmp_path / "limited")
    assert free.record is not None
    assert limited.record is not None
    assert (free.record.steps, free.record.planned_steps) == (16, 16)
    assert free.record.kl > 0.1
    assert limited.error is None
    assert 1 < limited.record.steps < limited.record.planned_steps == 16
    # The order of the steps depends on the dataset's bytes: seven orders ended at .0054 to .0170, after 4 to 7 steps.
    assert 0.002 < limited.record.kl < 0.04
    assert limited.record.learning_rate <= 4e-4


@pytest.mark.parametrize("target", [1e-4, 0.005, 0.01])
def test_a_step_that_only_finds_the_target_reached_trains_nothing_and_is_not_counted(
    run: Run, tmp_path: Path, model: Any, target: float
) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=8))
    fast = dataclasses.replace(GENTLE, learning_rate=4e-4, max_kl=1e9, rollouts_per_step=1, target_kl=target)
    (result,) = run(fast)
    record = result.record
    assert record is not None
    by_step = record.tokens_by_step
    assert [len(tokens) for tokens in by_step.values()] == [record.steps] * 3
    assert sum(by_step["trained"]) == record.trained_tokens
    assert record.rollouts == record.steps < 8
    if target == 1e-4:  # the first step alone moves further than that
        assert (record.steps, record.forwarded_tokens > sum(by_step["forwarded"])) == (1, True)
    tokens = pq.read_table(parts(tmp_path / "checkpoints", "policy-000001"))
    assert set(tokens["step"].to_pylist()) == set(range(1, record.steps + 1))
    assert sum(map(len, tokens["ratios"].to_pylist())) == record.trained_tokens


def test_passes_repeat_the_steps_against_the_policy_that_sampled(run: Run, tmp_path: Path, model: Any) -> None:
    calls = sample_rollouts(model, rollouts=4)
    write_dataset(tmp_path / "dataset", calls)
    (result,) = run(dataclasses.replace(GENTLE, passes=3, learning_rate=1e-4))
    assert (record := result.record) is not None
    trained = sum(len(call.completion_ids) for call in calls)
    assert (record.steps, record.planned_steps, record.rollouts, record.trained_tokens) == (6, 6, 4, 3 * trained)
    assert record.logp_diff_max < 1e-4, "the first step of the first pass"
    assert record.ratio_max > 1 + 1e-4
    tokens = pq.read_table(parts(tmp_path / "checkpoints", "policy-000001"))
    assert tokens.num_rows == len(calls), "the figures of a token are those of the first pass"
    assert set(tokens["step"].to_pylist()) == {1, 2}
