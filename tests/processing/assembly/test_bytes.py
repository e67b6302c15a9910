"""The same inputs and settings give the same bytes."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from trainspan_processing.assembly.build import BuiltDataset
from trainspan_processing.read import tokens
from trainspan_schemas.artifacts.dataset import COLUMNS


def _workload(bench: Bench, run: str) -> list[TestRollout]:
    """Twelve rollouts of three tasks, some with parallel agents."""
    made = []
    for number in range(12):
        rollout = chain(
            TestRollout(f"{run}-{number:02d}", run=run, task=f"t{number % 3}", begins=float(number)), 1 + number % 4
        )
        rollout.call(1 + number % 4, [50, number], [51], agent="other")
        made.append(rollout.reward(0.1 * number))
    return made


def _digests(built: BuiltDataset) -> list[str]:
    return [file["sha256"] for file in built.manifest["files"]]


def test_two_stores_with_half_the_rollouts_each_give_the_bytes_of_one(bench: Bench, tmp_path: Path) -> None:
    rollouts = _workload(bench, bench.run_id)
    bench.send(*rollouts)
    one = bench.build(round_=0)
    assert one.manifest["calls_kept"] == 42
    bench.send(*rollouts[::2], store=1)
    bench.send(*rollouts[1::2], store=2)
    for order in ((1, 2), (2, 1)):
        assert _digests(bench.build(stores=order, round_=0, out=tmp_path / f"{order}")) == _digests(one)


def test_a_store_given_twice_and_spans_sent_twice_change_nothing(bench: Bench, tmp_path: Path) -> None:
    rollouts = _workload(bench, bench.run_id)
    bench.send(*rollouts)
    once = bench.build(round_=0)
    bench.send(*rollouts, store=1)
    bench.send(*rollouts[:5])
    twice = bench.build(stores=(0, 1), round_=0, out=tmp_path / "twice")
    assert _digests(once) == _digests(twice)
    assert twice.manifest["calls_seen"] == once.manifest["calls_seen"]


def test_the_order_in_which_spans_arrive_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    rollouts = _workload(bench, bench.run_id)
    bench.send(*rollouts)
    in_order = bench.build(round_=0)
    shuffler = random.Random(1)
    for rollout in rollouts:
        shuffler.shuffle(rollout.spans)
    shuffler.shuffle(rollouts)
    bench.send(*rollouts, store=1)
    shuffled = bench.build(stores=(1,), round_=0, out=tmp_path / "shuffled")
    assert _digests(in_order) == _digests(shuffled)


@pytest.mark.parametrize(("bound", "most"), [("CALLS_PER_CHUNK", 10), ("TOKENS_PER_CHUNK", 100)])
def test_small_chunks_of_rows_change_nothing_but_the_row_groups(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    bench.send(*_workload(bench, bench.run_id))
    large = bench.build(round_=0)
    monkeypatch.setattr(tokens, bound, most)
    small = bench.build(round_=0, out=tmp_path / "small")
    assert rows(large).equals(rows(small))
    groups = [pq.ParquetFile(built.path / "part-00000.parquet").num_row_groups for built in (large, small)]
    assert groups[0] == 1
    assert groups[1] > 3


def test_the_file_has_the_agreed_columns_types_and_order(bench: Bench) -> None:
    bench.send(*_workload(bench, bench.run_id))
    built = bench.build(round_=0)
    schema = pq.ParquetFile(built.path / "part-00000.parquet").schema_arrow
    names = {"double": "float64", "list<element: int32>": "list<int32>", "list<element: float>": "list<float>"}
    assert {field.name: names.get(str(field.type), str(field.type)) for field in schema} == COLUMNS
    table = rows(built)
    order = ["run_id", "round", "task_id", "rollout_id", "attempt", "call_index"]
    assert table.select(order).equals(table.select(order).sort(order))
    assert table["tokens_source"].unique().to_list() == ["engine"]
    nullable = {"policy_version_spans", "constraint", "constraint_start", "reward", "parent_index", "next_index"}
    assert {name for name in COLUMNS if table[name].null_count()} == nullable


def test_interleaved_agents_merge_and_count_their_own_turns(bench: Bench) -> None:
    for name, reward in (("a", 0.0), ("b", 1.0)):
        rollout = bench.rollout(name).reward(reward)
        for index, (agent, prompt, completion) in enumerate(
            [("A", [1], [2]), ("B", [8], [9]), ("A", [1, 2, 5], [3]), ("B", [8, 9, 5], [7])]
        ):
            rollout.call(index, prompt, completion, agent=agent)
        bench.send(rollout)
    built = bench.build(round_=0)
    table = rows(built).head(4)
    assert table.select("agent", "turn", "segment_id", "segment_pos", "prefix_len").rows() == [
        ("A", 0, 0, 0, 0),
        ("B", 0, 1, 0, 0),
        ("A", 1, 0, 1, 2),
        ("B", 1, 1, 1, 2),
    ]
    assert built.manifest["merge_ratio"] == 1.0
    # per rollout: prompts of 1 + 1 + 3 + 3, of which 2 + 2 are already in the row
    assert built.manifest["tokens"] == {"prompt": 16, "environment": 8, "completion": 8}


def test_a_call_that_is_not_trained_is_environment_to_the_calls_after_it(bench: Bench) -> None:
    for name, reward in (("a", 0.0), ("b", 1.0)):
        rollout = bench.rollout(name).reward(reward)
        rollout.call(0, [1], [2])
        rollout.call(1, [1, 2, 5], [3], gen_ai__request__temperature=0.0)
        rollout.call(2, [1, 2, 5, 3, 6], [4])
        bench.send(rollout)
    table = rows(bench.build(round_=0)).head(2)
    assert table.select("call_index", "segment_id", "segment_pos", "prefix_len").rows() == [(0, 0, 0, 0), (2, 0, 1, 2)]


def test_missing_call_indexes_are_filled_in_by_start_time(bench: Bench) -> None:
    for name, reward in (("a", 0.0), ("b", 1.0)):
        rollout = bench.rollout(name).reward(reward)
        rollout.call(None, [3], [4], at=9.0)
        rollout.call(None, [1], [2], at=5.0)
        bench.send(rollout)
    table = rows(bench.build(round_=0)).head(2)
    assert table.select("call_index", "completion_ids").rows() == [(0, [2]), (1, [4])]
