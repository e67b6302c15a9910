"""Groups with late rollouts, and rewards that arrive even later."""

import json

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import SECOND, START_NS, TestRollout, chain
from trainspan_processing.assembly.rebuild import rebuild
from trainspan_processing.read import inventory
from trainspan_schemas.artifacts.dataset import about_dir
from trainspan_schemas.errors import NothingToTrainError
from trainspan_schemas.telemetry import keys

pytestmark = pytest.mark.ci


def _member(
    bench: Bench, name: str, reward: float, *, task: str = "t0", of: int = 3, ends: float = 100.0
) -> TestRollout:
    rollout = chain(bench.rollout(name, task=task, begins=ends - 100.0), 1)
    rollout.root_span.attributes[keys.GROUP_SIZE] = of
    return rollout.reward(reward)


def _at(bench: Bench, second: float) -> None:
    bench.now = START_NS + int(second * SECOND)


def _pair(bench: Bench, names: str = "yz", *, ends: float = 100.0) -> list[TestRollout]:
    return [_member(bench, name, float(n), task=f"t{names}", of=2, ends=ends) for n, name in enumerate(names)]


def test_what_arrived_of_a_group_waits_for_its_last_rollouts(bench: Bench) -> None:
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0), *_pair(bench))
    _at(bench, 150.0)
    first = bench.build(baseline="dr_grpo")
    assert rows(first)["advantage"].to_list() == [-0.5, 0.5]
    assert first.manifest["groups_incomplete"] == {"waiting": 1, "taken": 0}
    assert first.manifest["pending"] == {"rollouts": 2, "calls": 2}
    assert first.manifest["dropped"] == {"group_unfinished": 2}
    assert first.manifest["coverage"] == 1.0
    bench.send(_member(bench, "c", 2.0, ends=390.0))
    _at(bench, 400.0)
    second = bench.build(baseline="dr_grpo")
    assert rows(second)["advantage"].to_list() == [-1.0, 0.0, 1.0]
    assert second.manifest["groups_incomplete"] == {"waiting": 0, "taken": 0}
    assert second.manifest["dropped"] == {}


def test_an_attempt_that_will_be_made_again_has_not_arrived(bench: Bench) -> None:
    failed = TestRollout(f"{bench.run_id}-c", run=bench.run_id, task="t0", status="infra_error")
    failed.root_span.attributes[keys.GROUP_SIZE] = 3
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0), failed, *_pair(bench))
    _at(bench, 150.0)
    first = bench.build(baseline="dr_grpo")
    assert [name[-1] for name in rows(first)["rollout_id"].to_list()] == ["y", "z"]
    again = chain(bench.rollout("c", task="t0", attempt=1, begins=200.0), 1).reward(2.0)
    again.root_span.attributes[keys.GROUP_SIZE] = 3
    bench.send(again)
    _at(bench, 400.0)
    assert rows(bench.build(baseline="dr_grpo"))["advantage"].to_list() == [-1.0, 0.0, 1.0]


def test_a_group_that_is_spread_over_chunks_waits_as_a_whole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "spans_per_chunk", lambda spans: 1)
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0), *_pair(bench))
    _at(bench, 150.0)
    first = bench.build(baseline="dr_grpo")
    assert [name[-1] for name in rows(first)["rollout_id"].to_list()] == ["y", "z"]
    assert first.manifest["dropped"] == {"group_unfinished": 2}
    bench.send(_member(bench, "c", 2.0, ends=390.0))
    _at(bench, 400.0)
    assert rows(bench.build(baseline="dr_grpo"))["advantage"].to_list() == [-1.0, 0.0, 1.0]


def test_a_dataset_made_again_holds_nothing_back(bench: Bench) -> None:
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0), *_pair(bench))
    _at(bench, 150.0)
    first = bench.build(baseline="dr_grpo")
    again = rebuild(first.path, bench.out / "again", None, bench.clock)
    assert again.differences == []


def test_a_group_waits_only_so_long_and_is_then_taken_as_it_is(bench: Bench) -> None:
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0))
    _at(bench, 399.0)
    with pytest.raises(NothingToTrainError, match=r"group_unfinished \(2\): the last rollouts of their tasks"):
        bench.build()
    _at(bench, 401.0)
    built = bench.build(baseline="dr_grpo")
    assert rows(built)["advantage"].to_list() == [-0.5, 0.5]
    assert built.manifest["groups_incomplete"] == {"waiting": 0, "taken": 1}


def test_the_time_a_group_waits_is_a_setting(bench: Bench) -> None:
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0))
    _at(bench, 150.0)
    assert bench.build(group_wait_s=49.0).manifest["groups_incomplete"]["taken"] == 1


def test_the_command_waits_for_the_last_rollouts_with_wait(bench: Bench) -> None:
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0))
    _at(bench, 150.0)
    last = [_member(bench, "c", 2.0, ends=151.0)]
    bench.on_sleep = lambda: bench.send(*(last.pop() for _ in last[:1]))
    built = bench.build(baseline="dr_grpo", wait_s=30.0)
    assert rows(built)["advantage"].to_list() == [-1.0, 0.0, 1.0]
    assert sum(bench.slept) < 30.0


@pytest.mark.parametrize("spans", [1, 100_000])
@pytest.mark.parametrize("others_were_used", [False, True])
def test_it_waits_for_rollouts_that_have_not_begun_in_several_chunks_and_among_used_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, spans: int, others_were_used: bool
) -> None:
    monkeypatch.setattr(inventory, "spans_per_chunk", lambda _: spans)
    bench.send(*_pair(bench))
    if others_were_used:
        bench.build()
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0))
    _at(bench, 150.0)
    last = [_member(bench, "d", 9.0, ends=151.0), _member(bench, "c", 2.0, ends=151.0)]
    bench.on_sleep = lambda: bench.send(*(last.pop() for _ in last[:1]))
    built = bench.build(baseline="dr_grpo", wait_s=30.0)
    of_group = rows(built).filter(pl.col("task_id") == "t0")
    assert of_group["advantage"].to_list() == [-1.0, 0.0, 1.0]
    assert built.manifest["groups_incomplete"] == {"waiting": 0, "taken": 0}
    assert len(last) == 1, "it waits no longer than it must"


def test_a_group_some_of_whose_rollouts_were_used_waits_for_the_last_ones(bench: Bench) -> None:
    bench.send(_member(bench, "a", 0.0, of=4), _member(bench, "b", 1.0, of=4))
    _at(bench, 500.0)
    assert bench.build().manifest["groups_incomplete"] == {"waiting": 0, "taken": 1}
    bench.send(_member(bench, "c", 2.0, of=4, ends=490.0))
    last = [_member(bench, "d", 4.0, of=4, ends=501.0)]
    bench.on_sleep = lambda: bench.send(*(last.pop() for _ in last[:1]))
    assert rows(bench.build(baseline="dr_grpo", wait_s=30.0))["advantage"].to_list() == [-1.0, 1.0]


@pytest.mark.parametrize("spans", [1, 100_000])
def test_it_waits_no_longer_than_its_timeout(bench: Bench, monkeypatch: pytest.MonkeyPatch, spans: int) -> None:
    monkeypatch.setattr(inventory, "spans_per_chunk", lambda _: spans)
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0), *_pair(bench))
    _at(bench, 174.0)
    built = bench.build(wait_s=1.0, group_wait_s=80.0)
    assert sum(bench.slept) == pytest.approx(1.0)
    assert built.manifest["groups_incomplete"] == {"waiting": 1, "taken": 0}
    # Nothing arrived: only the groups are checked, until their time is up.
    bench.slept.clear()
    built = bench.build(wait_s=600.0, group_wait_s=80.0)
    assert built.manifest["groups_incomplete"] == {"waiting": 0, "taken": 1}
    assert sum(bench.slept) == pytest.approx(180.0 - 175.0, abs=2.0)


def test_rollouts_that_failed_have_arrived_too(bench: Bench) -> None:
    crashed = _member(bench, "c", 0.0)
    crashed.root_span.attributes[keys.ROLLOUT_STATUS] = "agent_error"
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0), crashed)
    _at(bench, 150.0)
    built = bench.build()
    assert built.manifest["rows"] == 2
    assert built.manifest["groups_incomplete"] == {"waiting": 0, "taken": 0}


def test_validation_is_not_waited_for(bench: Bench) -> None:
    val = chain(bench.rollout("v", task="tv", split="val"), 1)
    val.root_span.attributes[keys.GROUP_SIZE] = 4
    bench.send(val.reward(1.0), *_pair(bench))
    _at(bench, 150.0)
    built = bench.build(wait_s=30.0)
    assert bench.slept == []
    assert built.manifest["groups_incomplete"] == {"waiting": 0, "taken": 0}


def test_a_member_whose_calls_are_still_arriving_holds_its_group(bench: Bench) -> None:
    slow = chain(bench.rollout("c", stated_calls=2), 1).reward(2.0)
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0), slow)
    _at(bench, 101.0)
    with pytest.raises(NothingToTrainError, match="none of 3 calls"):
        bench.build()


def test_a_round_takes_its_groups_as_they_are_since_no_other_dataset_will(bench: Bench) -> None:
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0))
    _at(bench, 150.0)
    built = bench.build(round_=0)
    assert built.manifest["rows"] == 2
    assert built.manifest["groups_incomplete"] == {"waiting": 0, "taken": 1}


def test_a_group_whose_others_were_used_is_as_complete_as_it_will_be(bench: Bench) -> None:
    bench.send(_member(bench, "a", 0.0), _member(bench, "b", 1.0))
    bench.build()
    bench.send(_member(bench, "c", 2.0, ends=9_990.0))
    assert bench.build(baseline="none").manifest["groups_incomplete"] == {"waiting": 0, "taken": 0}


def _late_reward(rollout: TestRollout, at: float, name: str = "reward") -> TestRollout:
    late = TestRollout(rollout.rollout_id)
    late.spans.clear()
    return late.log_reward(0.5, at=at, **{keys.EVALUATION_NAME: name})


def test_rewards_that_come_after_their_rollout_was_used_are_counted_once(bench: Bench) -> None:
    used = _pair(bench, "ab")
    bench.send(*used)
    assert bench.build().manifest["rewards_late"] == 0
    bench.send(_late_reward(used[0], 500.0), _late_reward(used[0], 501.0), _late_reward(used[1], 502.0))
    bench.send(_late_reward(used[0], 503.0, "style"), *_pair(bench, "cd"))
    built = bench.build()
    assert built.manifest["rewards_late"] == 3
    assert built.manifest["dropped"] == {}
    bench.send(*_pair(bench, "ef"))
    assert bench.build().manifest["rewards_late"] == 0
    bench.send(_late_reward(used[1], 504.0), *_pair(bench, "gh"))
    assert bench.build().manifest["rewards_late"] == 1


def test_datasets_of_earlier_versions_do_not_say_how_many_rewards_they_saw(bench: Bench) -> None:
    used = _pair(bench, "ab")
    bench.send(*used)
    ledger = about_dir(bench.build().path) / "rollouts.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    ledger.write_text(
        "".join(
            json.dumps({k: v for k, v in line.items() if k not in ("evaluations", "rewards")}) + "\n" for line in lines
        )
    )
    bench.send(_late_reward(used[0], 500.0), *_pair(bench, "cd"))
    built = bench.build()
    assert (built.manifest["rewards_late"], built.manifest["rows"]) == (0, 2)
