"""`trainspan diff`: the differences that it finds, and its exit codes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from trainspan_processing.dataset.diff import Difference, ItemChange, Overlap, ValueChanges, compare_datasets
from trainspan_processing.dataset.published import open_published
from trainspan_schemas.errors import DatasetError, UsageError


def _diff(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trainspan_cli", "diff", *map(str, arguments)]
    environ = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


def _four(bench: Bench) -> None:
    """Rewards 1, 0 in one group and 1, 1 in the other, two calls each."""
    for task, rewards in (("mixed", (1.0, 0.0)), ("even", (1.0, 1.0))):
        bench.send(
            *(chain(bench.rollout(f"{task}{n}", task=task), 2).reward(reward) for n, reward in enumerate(rewards))
        )


def test_the_same_settings_from_another_store_are_no_difference(bench: Bench) -> None:
    rollouts = [chain(bench.rollout(name), 2).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0))]
    bench.send(*rollouts)
    bench.send(*rollouts, store=1)
    one = bench.build(out=bench.out / "one")
    two = bench.build(out=bench.out / "two", stores=(1,))
    done = _diff(one.path, two.path)
    assert (done.returncode, done.stdout.strip()) == (0, "no difference: 4 rows of 2 rollouts")


@pytest.mark.parametrize("what", ["settings", "rollouts", "rows", "rewards", "advantages", "columns", "order_differs"])
def test_each_kind_of_change_is_a_difference(what: str) -> None:
    same, none = Overlap(0, 0, 4, {}, {}), ValueChanges(4, 0, 1.0, 1.0, 0.0, 0.0, 0, 1.0, [])
    alike = Difference([], same, same, none, none, {}, order_differs=False)
    assert alike.is_empty
    changes: dict[str, tuple[object, ...]] = {
        "settings": ([ItemChange("baseline", "rloo", "grpo")],),
        "rollouts": (replace(same, only_a=1), replace(same, only_b=1)),
        "rows": (replace(same, only_a=1), replace(same, only_b=1)),
        "rewards": (replace(none, changed=1),),
        "advantages": (replace(none, changed=1),),
        "columns": ({"temperature": 1},),
        "order_differs": (True,),
    }
    for change in changes[what]:
        assert not replace(alike, **{what: change}).is_empty  # type: ignore[arg-type]


def test_another_baseline_changes_advantages_and_nothing_else(bench: Bench) -> None:
    _four(bench)
    a, b = bench.build(out=bench.out / "a", baseline="dr_grpo"), bench.build(out=bench.out / "b", baseline="rloo")
    difference = compare_datasets(open_published(a.path), open_published(b.path))
    assert difference.settings == [ItemChange("baseline", "dr_grpo", "rloo")]
    assert (difference.rows.both, difference.rows.only_a, difference.rows.only_b) == (4, 0, 0)
    assert (difference.rewards.of, difference.rewards.changed) == (4, 0)
    # R − μ = ±1/2 becomes R − the other = ±1.
    assert (difference.advantages.changed, difference.advantages.mean_change) == (4, 0.5)
    assert (difference.advantages.sign_flips, difference.advantages.correlation) == (0, pytest.approx(1.0))
    assert {(abs(change.before), abs(change.after)) for change in difference.advantages.largest} == {(0.5, 1.0)}
    assert difference.columns == {}


def test_rows_that_one_dataset_dropped_are_named_with_the_reason(bench: Bench) -> None:
    _four(bench)
    a, b = bench.build(out=bench.out / "a"), bench.build(out=bench.out / "b", keep_zero_spread=True)
    difference = compare_datasets(open_published(a.path), open_published(b.path))
    assert (difference.rows.only_b, difference.rows.why_not_in_a) == (4, {"zero_spread_group": 4})
    assert (difference.rollouts.only_b, difference.rollouts.why_not_in_a) == (2, {"zero_spread_group": 2})
    table = _diff(a.path, b.path)
    assert table.returncode == 1
    assert "rows: 0 only in A, 4 only in B, 4 in both\n  not in A: 4 zero_spread_group\n" in table.stdout
    assert "setting keep_zero_spread: False → True" in table.stdout
    assert json.loads(_diff(a.path, b.path, "--format", "json").stdout)["equal"] is False


def test_another_reward_flips_signs(bench: Bench) -> None:
    for name, good in (("a", 1.0), ("b", 0.0)):
        rollout = chain(bench.rollout(name), 1).reward(good)
        bench.send(rollout.reward(1.0 - good, **{"gen_ai.evaluation.name": "other"}))
    a, b = bench.build(out=bench.out / "a"), bench.build(out=bench.out / "b", reward_name="other")
    difference = compare_datasets(open_published(a.path), open_published(b.path))
    assert (difference.rewards.changed, difference.rewards.correlation) == (2, pytest.approx(-1.0))
    assert difference.advantages.sign_flips == 2
    assert difference.columns == {"return": 2, "rollout_reward": 2}


def test_rounds_have_no_row_in_common(bench: Bench) -> None:
    for round_ in (1, 2):
        bench.send(
            *(chain(bench.rollout(f"{round_}{n}", round=round_), 1).reward(n) for n in (0.0, 1.0)),
        )
    a, b = bench.build(round_=1), bench.build(round_=2)
    difference = compare_datasets(open_published(a.path), open_published(b.path))
    assert (difference.rows.only_a, difference.rows.only_b, difference.rows.both) == (2, 2, 0)
    assert difference.rows.why_not_in_b == {"not seen": 2}


def test_what_is_no_dataset_is_exit_code_2_in_one_line(bench: Bench, tmp_path: Path) -> None:
    _four(bench)
    built = bench.build()
    missing = _diff(built.path, tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert len(missing.stderr.splitlines()) == 1
    with pytest.raises(UsageError, match=r"name one of its datasets, e\.g\. .*round-0000"):
        open_published(built.path.parent)
    (built.path / "part-00000.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DatasetError, match="the dataset is damaged"):
        compare_datasets(open_published(built.path), open_published(built.path))
    assert _diff(built.path, built.path).returncode == 2
