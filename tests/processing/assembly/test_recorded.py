"""explain and rebuild reproduce what a dataset's own run saw: its time, its stores' state, its earlier datasets."""

from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from trainspan_processing.assembly.build import BuiltDataset
from trainspan_processing.assembly.rebuild import rebuild
from trainspan_processing.dataset.published import open_published
from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.explain import explain_rollout
from trainspan_processing.explain.inquiry import NEWEST, Question
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys


def _explain(
    bench: Bench, name: str, dataset: BuiltDataset, *, store: int = 0, attempt: int | None = None
) -> RolloutAccount:
    wanted = name if name == NEWEST else f"{bench.run_id}-{name}"
    stores = [str(bench.collectors[store].store)]
    question = Question(stores, wanted, DatasetSettings(), attempt, open_published(dataset.path))
    return explain_rollout(question, bench.clock)


def _rebuilt(bench: Bench, dataset: BuiltDataset, out: Path, *, store: int = 0) -> list[str]:
    return rebuild(dataset.path, out, [str(bench.collectors[store].store)], bench.clock).differences


def _send(
    bench: Bench, rewards: dict[str, float], *, task: str, begins: float = 0.0, store: int = 0, **more: Any
) -> None:
    made = [chain(bench.rollout(name, task=task, begins=begins, **more), 1).reward(r) for name, r in rewards.items()]
    bench.send(*made, store=store)


@pytest.mark.ci
@pytest.mark.parametrize("store", [0, 1])
def test_rollouts_that_an_earlier_dataset_dropped_are_compared_again(bench: Bench, tmp_path: Path, store: int) -> None:
    for place in {0, store}:
        _send(bench, {"a": 1.0, "b": 1.0}, task="even", store=place)
        _send(bench, {"c": 0.0, "d": 1.0}, task="first", store=place)
    first = bench.build(baseline="batch")
    assert first.manifest["dropped"] == {"zero_spread_group": 2}
    for place in {0, store}:
        _send(bench, {"e": 0.0, "f": 4.0}, task="second", store=place)
    second = bench.build(baseline="batch")
    # R is 1 1 0 4: the spread includes a and b, which again gave no row.
    assert rows(second)["advantage"].to_list() == pytest.approx([-2 / 3**0.5, 2 / 3**0.5], abs=1e-3)
    account = _explain(bench, "f", second, store=store)
    assert (account.agrees, account.unlike) == (True, 0)
    assert account.calls[0].advantage == rows(second)["advantage"][1]
    assert _explain(bench, "a", second, store=store).calls[0].reason == "zero_spread_group"
    assert _rebuilt(bench, second, tmp_path / "again", store=store) == []


def test_later_datasets_are_no_part_of_its_history(bench: Bench, tmp_path: Path) -> None:
    _send(bench, {"a": 0.0, "b": 1.0}, task="t0")
    bench.build(baseline="running")
    _send(bench, {"c": 3.0}, task="t1", begins=500.0)
    second = bench.build(baseline="running")
    _send(bench, {"d": 9.0}, task="t2", begins=200.0)  # ended before c, and arrived after c was used
    bench.build(baseline="running")
    assert rows(second)["advantage"].to_list() == [2.5]
    account = _explain(bench, "c", second)
    assert (account.agrees, account.calls[0].advantage) == (True, 2.5)
    assert _rebuilt(bench, second, tmp_path / "again") == []


def test_what_came_since_is_not_shown(bench: Bench, tmp_path: Path) -> None:
    _send(bench, {"a": 0.0, "b": 1.0}, task="t0")
    built = bench.build(baseline="dr_grpo")
    late = TestRollout(f"{bench.run_id}-a")
    late.spans.clear()
    bench.send(late.log_reward(8.0, at=9_000.0))
    _send(bench, {"c": 5.0}, task="t0")
    _send(bench, {"a": 7.0}, task="t0", attempt=1)
    account = _explain(bench, "a", built)
    assert (account.attempt, account.agrees, account.unlike) == (0, True, 0)
    assert [member.reward for member in account.credit.members] == [0.0, 1.0]
    assert len(account.edges) == 1
    assert _explain(bench, NEWEST, built).rollout_id[-1] in "ab"
    with pytest.raises(UsageError, match=r"does not cover rollout .*-c: name the dataset that does"):
        _explain(bench, "c", built)
    with pytest.raises(UsageError, match=r"does not cover attempt 1 of rollout .*-a: it covers 0"):
        _explain(bench, "a", built, attempt=1)
    assert _rebuilt(bench, built, tmp_path / "again") == []


def test_groups_that_waited_are_not_compared(bench: Bench, tmp_path: Path) -> None:
    held = [chain(bench.rollout(name, task="held", begins=9_890.0), 1).reward(50.0) for name in "ab"]
    for rollout in held:
        rollout.root_span.attributes[keys.GROUP_SIZE] = 3
    bench.send(*held)
    _send(bench, {"c": 0.0, "d": 1.0}, task="whole")
    built = bench.build(baseline="batch")
    assert built.manifest["dropped"] == {"group_unfinished": 2}
    bench.now += 10**13
    assert _explain(bench, "d", built).agrees is True
    account = _explain(bench, "a", built)
    assert [call.reason for call in account.calls] == ["group_unfinished"]
    assert _rebuilt(bench, built, tmp_path / "again") == []


def test_rollouts_that_are_not_in_the_store_any_more_are_counted(bench: Bench, tmp_path: Path) -> None:
    _send(bench, {"a": 0.0, "b": 1.0, "c": 3.0}, task="t0")
    built = bench.build(baseline="dr_grpo")
    _send(bench, {"a": 0.0, "b": 1.0}, task="t0", store=2)
    account = _explain(bench, "a", built, store=2)
    assert (account.agrees, account.unlike) == (False, 1)
    assert account.verdict is not None
    assert "OTHER advantages; 1 rollout that it compared is not in these stores" in account.verdict
    assert "1 of its rollouts are not in the stores" in "; ".join(_rebuilt(bench, built, tmp_path / "again", store=2))
