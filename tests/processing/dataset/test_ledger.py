"""No call is accidentally trained or counted twice."""

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from trainspan_schemas.artifacts.dataset import dataset_dirs
from trainspan_schemas.errors import DatasetError


def _pair(bench: Bench, names: str = "ab", **more: int) -> list[TestRollout]:
    return [
        chain(bench.rollout(name, task=f"t{names}", **more), 1).reward(float(number))
        for number, name in enumerate(names)
    ]


def _rollouts(bench: Bench, **settings: float) -> list[str]:
    found = rows(bench.build(**settings))["rollout_id"].to_list()
    return [name.removeprefix(f"{bench.run_id}-") for name in found]


def test_each_dataset_takes_what_no_earlier_one_used(bench: Bench) -> None:
    bench.send(*_pair(bench, "ab"))
    assert _rollouts(bench) == ["a", "b"]
    with pytest.raises(DatasetError, match=r"no call in run .* is waiting for a dataset"):
        bench.build()
    bench.send(*_pair(bench, "cd"))
    assert _rollouts(bench) == ["c", "d"]
    assert [folder.name for folder in dataset_dirs(bench.out)] == ["round-0000", "round-0001"]


def test_another_folder_of_datasets_may_use_them_again(bench: Bench) -> None:
    bench.send(*_pair(bench))
    first = bench.build()
    again = bench.build(out=bench.out / "replay", baseline="dr_grpo")
    assert rows(first)["rollout_id"].to_list() == rows(again)["rollout_id"].to_list()
    assert rows(again)["advantage"].to_list() == [-0.5, 0.5]


def test_calls_that_come_after_a_dataset_used_their_rollout_are_counted_once_and_never_trained(bench: Bench) -> None:
    pair = _pair(bench, "ab")
    bench.send(*pair)
    bench.build()
    late = TestRollout(pair[0].rollout_id, task=pair[0].task, run=pair[0].run)
    late.spans.clear()
    late.call(1, [5], [6])
    bench.send(late, *_pair(bench, "cd"))
    built = bench.build()
    assert built.manifest["dropped"] == {"late_after_consumed": 1}
    assert rows(built)["rollout_id"].n_unique() == 2
    bench.send(*_pair(bench, "ef"))
    assert bench.build().manifest["dropped"] == {}


def test_what_was_dropped_is_counted_once_but_taken_when_its_reward_comes(bench: Bench) -> None:
    waiting = chain(bench.rollout("x", task="tab"), 1)
    bench.send(*_pair(bench, "ab"), waiting)
    assert bench.build(min_coverage=0.0).manifest["dropped"] == {"no_reward": 1}
    bench.send(*_pair(bench, "cd"))
    assert bench.build().manifest["dropped"] == {}
    human = TestRollout(waiting.rollout_id)
    human.spans.clear()
    human.log_reward(0.5, at=5_000.0)
    bench.send(human)
    assert rows(bench.build(baseline="running"))["rollout_id"].to_list() == [waiting.rollout_id]


def test_a_pending_rollout_is_left_to_the_next_dataset(bench: Bench) -> None:
    slow = chain(bench.rollout("x", stated_calls=2, task="tab"), 1).reward(0.5)
    bench.send(*_pair(bench), slow)
    bench.now = slow.spans[0].proto().scope_spans[0].spans[0].end_time_unix_nano
    assert bench.build().manifest["pending"]["rollouts"] == 1
    rest = TestRollout(slow.rollout_id, task="tab", run=slow.run)
    rest.spans.clear()
    rest.call(1, [9], [9])
    bench.send(rest)
    assert rows(bench.build(baseline="none"))["call_index"].to_list() == [0, 1]


def test_a_round_that_was_built_is_left_as_it_is(bench: Bench) -> None:
    bench.send(*_pair(bench, "ab", round=4))
    first = bench.build(round_=4)
    bench.send(*_pair(bench, "cd", round=4))
    second = bench.build(round_=4)
    assert first.path.name == "round-0004"
    assert (second.was_there, second.sha256) == (True, first.sha256)
    with pytest.raises(DatasetError, match="was built with other settings"):
        bench.build(round_=4, baseline="rloo")


def test_a_round_takes_only_its_own_rollouts(bench: Bench) -> None:
    bench.send(*_pair(bench, "ab", round=1), *_pair(bench, "cd", round=2))
    assert rows(bench.build(round_=2))["round"].to_list() == [2, 2]


def test_running_is_the_default_without_task_ids_and_remembers_earlier_datasets(bench: Bench) -> None:
    def alone(name: str, ends: float, reward: float) -> TestRollout:
        return chain(bench.rollout(name, task=None, begins=ends - 100.0), 1).reward(reward)

    bench.send(alone("b", 200.0, 1.0), alone("a", 300.0, 4.0))
    first = bench.build()
    assert first.manifest["credit"]["baseline"] == "running"
    # "b" ended first, with nothing before it; 4 − 1
    assert first.manifest["dropped"] == {"singleton_group": 1}
    assert rows(first)["advantage"].to_list() == [3.0]
    bench.send(alone("c", 400.0, 0.0))
    # 0 − (1 + 4) / 2
    assert rows(bench.build())["advantage"].to_list() == [-2.5]


def test_step_and_running_remember_what_calls_of_each_turn_earned(bench: Bench) -> None:
    def alone(name: str, ends: float, *steps: float) -> TestRollout:
        rollout = bench.rollout(name, task=None, begins=ends - 100.0)
        for index, score in enumerate(steps):
            rollout.reward(score, on=rollout.call(index, [index + 1], [9]))
        return rollout

    bench.send(alone("a", 200.0, 1.0, 8.0), alone("b", 300.0, 3.0, 8.0))
    assert rows(bench.build(credit="step"))["advantage"].to_list() == [2.0, 0.0]
    bench.send(alone("c", 400.0, 3.0, 2.0))
    # turn 0: 3 − (1 + 3)/2; turn 1: 2 − 8
    assert rows(bench.build(credit="step"))["advantage"].to_list() == [1.0, -6.0]


def test_without_task_ids_groups_are_those_of_the_first_prompt(bench: Bench) -> None:
    for name, first, reward in (("a", 1, 0.0), ("b", 2, 5.0), ("c", 1, 1.0), ("d", 2, 7.0)):
        rollout = bench.rollout(name, task=None).reward(reward)
        rollout.call(0, [first], [3])
        rollout.call(1, [8, len(name)], [4])
        bench.send(rollout)
    table = rows(bench.build(baseline="dr_grpo"))
    assert table["advantage"].to_list() == [-0.5, -0.5, -1.0, -1.0, 0.5, 0.5, 1.0, 1.0]
    groups = table["group_id"].to_list()
    assert groups[0] == groups[4] != groups[2] == groups[6]
