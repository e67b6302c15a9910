"""Stored runs used again with other rewards, credit, filters and splits; a dataset rebuilt from its manifest alone."""

from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain
from trainspan_processing.assembly.build import BuiltDataset
from trainspan_processing.assembly.rebuild import Rebuilt, rebuild
from trainspan_processing.dataset.ledger import ledger_path
from trainspan_processing.stored_rollout import StoredRollout
from trainspan_schemas.errors import DatasetError

pytestmark = pytest.mark.ci

_MODULE = "tests.processing.assembly.test_rebuild"


def longer_than_one(rollout: StoredRollout) -> bool:
    return len(rollout.calls) > 1


def raises(rollout: StoredRollout) -> bool:
    raise KeyError(rollout.task_id)


def _digests(built: BuiltDataset) -> list[str]:
    return [file["sha256"] for file in built.manifest["files"]]


def _rebuild(bench: Bench, built: BuiltDataset, out: Path, stores: tuple[int, ...] = ()) -> Rebuilt:
    paths = [str(bench.collectors[number].store) for number in stores]
    return rebuild(built.path, out, paths or None, bench.clock)


def _send(bench: Bench, *, stores: tuple[int, ...] = (0,), first: int = 0) -> None:
    for number in range(first, first + 8):
        rollout = chain(bench.rollout(f"r{number}", task=f"t{number // 2}", begins=100.0 * number), 1 + number % 3)
        rollout.reward(float(number % 2)).reward(0.25 * number, **{"gen_ai.evaluation.name": "style"})
        for store in stores:
            bench.send(rollout, store=store)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"credit": "return_to_go", "gamma": 0.9, "baseline": "rloo"},
        {"reward_name": "reward,style=0.5", "combine": "gdpo"},
        {"reward": "tests.processing.support.reward_functions:length", "baseline": "dr_grpo"},
        {"filter": f"{_MODULE}:longer_than_one", "baseline": "none", "split": "all", "min_coverage": 0.0},
    ],
)
def test_a_dataset_made_again_from_its_manifest_has_equal_bytes(
    bench: Bench, tmp_path: Path, settings: dict[str, Any]
) -> None:
    _send(bench)
    built = bench.build(**settings)
    _send(bench, first=8)  # later data are not in it
    again = _rebuild(bench, built, tmp_path / "again")
    assert again.differences == []
    assert _digests(again.built) == _digests(built)
    assert again.built.path.name == built.path.name


def test_the_same_rollouts_in_two_stores_make_it_again(bench: Bench, tmp_path: Path) -> None:
    _send(bench)
    built = bench.build()
    _send(bench, stores=(1,), first=0)
    assert _rebuild(bench, built, tmp_path / "other", (1,)).differences == []
    assert _rebuild(bench, built, tmp_path / "both", (0, 1)).differences == []


def test_a_baseline_that_remembers_is_made_again_with_the_memory_it_had(bench: Bench, tmp_path: Path) -> None:
    _send(bench)
    bench.build(baseline="running")
    _send(bench, first=8)
    second = bench.build(baseline="running")
    _send(bench, first=16)
    bench.build(baseline="running")
    assert _rebuild(bench, second, tmp_path / "again").differences == []
    ledger_path(bench.out / "round-0000").write_text("")
    with pytest.raises(
        DatasetError, match=r"round-0001 was built after 1 dataset in .*, and a ledger there has changed"
    ):
        _rebuild(bench, second, tmp_path / "changed")


def test_a_later_reward_changes_nothing_in_its_own_store_and_is_reported_of_another(
    bench: Bench, tmp_path: Path
) -> None:
    _send(bench, stores=(0, 1))
    built = bench.build()
    late = bench.rollout("r0", status=None)
    late.spans.clear()
    late.log_reward(5.0, at=9_000.0)
    for store in (0, 1):
        bench.send(late, store=store)
    assert _rebuild(bench, built, tmp_path / "again").differences == []
    assert _rebuild(bench, built, tmp_path / "other", (1,)).differences == [
        "15 rows, 15 in the rebuild",
        "rewards differ: some arrived after the dataset was built or are not in the stores",
    ]


def test_it_is_not_made_again_over_itself(bench: Bench) -> None:
    _send(bench)
    with pytest.raises(DatasetError, match="choose another --out"):
        _rebuild(bench, bench.build(), bench.out)


def test_stored_runs_are_filtered_and_split_again(bench: Bench) -> None:
    _send(bench)
    filtered = bench.build(baseline="none", filter=f"{_MODULE}:longer_than_one", out=bench.out / "a")
    assert filtered.manifest["dropped"] == {"not_selected": 3}
    assert rows(filtered)["rollout_id"].n_unique() == 5
    with pytest.raises(DatasetError, match="raised KeyError: 't0' on rollout"):
        bench.build(filter=f"{_MODULE}:raises", out=bench.out / "b")
    # blake2b, as a fraction: t0 .87, t1 .80, t2 .10, t3 .55
    part = bench.build(split="0.5", out=bench.out / "c")
    kept = rows(part)["task_id"].unique().sort().to_list()
    assert kept == ["t2"]
    assert set(part.manifest["dropped"]) == {"validation"}
    assert rows(bench.build(split="all", out=bench.out / "d"))["task_id"].n_unique() == 4


def test_rollouts_of_earlier_rounds_are_not_looked_at_again(bench: Bench, tmp_path: Path) -> None:
    for round_ in (1, 2, 3):
        for number in range(4):
            begins = 1000.0 * round_ + 100.0 * number
            rollout = chain(bench.rollout(f"{round_}-{number}", task=f"t{number // 2}", round=round_, begins=begins), 2)
            # The second task of each round has equal rewards and is dropped.
            bench.send(rollout.reward(float(number % 2 and number < 2)))
    since = bench.build(since_round=2, number=7)
    assert since.path.name == "round-0007"
    assert set(rows(since)["round"]) == {2, 3}
    assert since.manifest["calls_seen"] == 16, "two rounds of four rollouts of two calls"
    again = _rebuild(bench, since, tmp_path / "again")
    assert _digests(again.built) == _digests(since)
    assert not again.differences
    whole = bench.build(number=8)
    assert set(rows(whole)["round"]) == {1}
