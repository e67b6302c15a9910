"""From a real collector's store to a dataset."""

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain
from trainspan_schemas.artifacts.dataset import COLUMNS


def test_two_rollouts_of_a_task_become_rows_with_grpo_advantages(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("b"), 2).reward(0.0))
    built = bench.build(round_=0)
    table = rows(built)
    assert table.columns == list(COLUMNS)
    assert table["rollout_id"].to_list() == [f"{bench.run_id}-{name}" for name in "aabb"]
    assert table["segment_pos"].to_list() == [0, 1, 0, 1]
    assert table["prefix_len"].to_list() == [0, 8, 0, 8]
    # μ = 0.5, σ (ddof 1) = 1/√2; ±0.5 / (0.70710678 + 1e-4)
    assert table["advantage"].round(6).to_list() == [0.707007, 0.707007, -0.707007, -0.707007]
