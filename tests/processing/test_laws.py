"""What must not change the advantages."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspan_processing.baselines import BASELINES
from trainspan_processing.credit import CREDITS, assign_credit
from trainspan_processing.grouping import compare, with_groups
from trainspan_processing.ledger import LEDGER, Ledger

Rollout = tuple[int, float, int]
"""(task, reward, number of calls)"""

_ROLLOUTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.25, 1.0]), st.integers(1, 4)), min_size=1, max_size=9
)
_NO_HASHES = pl.DataFrame(schema={"rollout_id": pl.String, "attempt": pl.Int32, "prompt_hash": pl.String})
_NO_LEDGER = Ledger(pl.DataFrame(schema=LEDGER))


def _rollouts(rollouts: list[Rollout]) -> pl.DataFrame:
    numbers = range(len(rollouts))
    return pl.DataFrame(
        {
            "rollout": list(numbers),
            "rollout_id": [f"r{number}" for number in numbers],
            "attempt": [0] * len(rollouts),
            "run_id": ["run"] * len(rollouts),
            "round": [0] * len(rollouts),
            "task_id": [f"t{task}" for task, _, _ in rollouts],
            "end_ns": list(numbers),
            "reward": [reward for _, reward, _ in rollouts],
        },
        schema_overrides={"rollout": pl.UInt32, "attempt": pl.Int32, "round": pl.Int32},
    )


def _calls(rollouts: list[Rollout]) -> pl.DataFrame:
    rows = [
        (number, position, None, reward)
        for number, (_, reward, calls) in enumerate(rollouts)
        for position in range(calls)
    ]
    schema = {"rollout": pl.UInt32, "position": pl.UInt32, "step_reward": pl.Float64, "rollout_reward": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _advantages(rollouts: pl.DataFrame, calls: pl.DataFrame, baseline: str) -> dict[int, float]:
    """Rollout → advantage of its calls, which `identical` makes the same."""
    _, compared = compare(with_groups(rollouts, _NO_HASHES), baseline, _NO_LEDGER)
    credited = assign_credit(CREDITS["identical"](calls, 1.0), compared)
    found = credited.group_by("rollout").agg(pl.col("advantage").n_unique().alias("n"), pl.col("advantage").first())
    assert found["n"].to_list() == [1] * found.height
    return dict(found.select("rollout", "advantage").iter_rows())


@given(_ROLLOUTS, st.sampled_from(sorted(BASELINES)))
def test_a_rollout_with_more_calls_weighs_no_more(rollouts: list[Rollout], baseline: str) -> None:
    doubled = [(task, reward, 2 * calls) for task, reward, calls in rollouts]
    frame = _rollouts(rollouts)
    assert _advantages(frame, _calls(rollouts), baseline) == _advantages(frame, _calls(doubled), baseline)


@given(_ROLLOUTS, st.sampled_from(sorted(BASELINES)), st.integers(0, 5))
def test_the_order_of_rollouts_and_calls_changes_nothing(rollouts: list[Rollout], baseline: str, seed: int) -> None:
    frame, calls = _rollouts(rollouts), _calls(rollouts)
    shuffled = (part.sample(fraction=1.0, shuffle=True, seed=seed) for part in (frame, calls))
    assert _advantages(*shuffled, baseline) == _advantages(frame, calls, baseline)


@given(_ROLLOUTS, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_no_comparison(rollouts: list[Rollout], constant: float) -> None:
    shifted = [(task, reward + constant, calls) for task, reward, calls in rollouts]
    for baseline in ("grpo", "dr_grpo", "rloo"):
        before = _advantages(_rollouts(rollouts), _calls(rollouts), baseline)
        after = _advantages(_rollouts(shifted), _calls(shifted), baseline)
        assert after == pytest.approx(before, abs=1e-9)
