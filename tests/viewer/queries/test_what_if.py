"""What if: the advantages of a group with other settings are those of a dataset that was made whole with these settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain
from trainspan_processing.credit import baselines
from trainspan_processing.credit.groups import with_groups
from trainspan_processing.explain.explain import explain_group
from trainspan_processing.explain.inquiry import Question, inquire
from trainspan_schemas.config.settings import DatasetSettings, Settings
from trainspan_schemas.errors import UsageError
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError, ViewerPaths
from trainspan_viewer.queries.rollout.group import GroupModel, load_group
from trainspan_viewer.queries.rollout.rollout import load_rollout
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader

Advantages = dict[tuple[str, int], float]

SETTINGS: list[dict[str, Any]] = [
    {"credit": "return_to_go", "gamma": 0.9, "baseline": "dr_grpo"},
    {"credit": "gigpo", "episode_weight": 0.5, "state_weight": 2.0},
    {"air": "tool_error=-0.25,repeated_call=-0.125", "credit": "return_to_go"},
    # This compares with rollouts of other tasks.
    {"reward_name": "reward=1,style?=0.5", "combine": "gdpo"},
]
MORE: list[dict[str, Any]] = [
    {"baseline": "global"},
    {"credit": "per_agent", "agent_credit": "coder=return_to_go+rloo,*=dr_grpo"},
    {"credit": "step", "step_by": "agent", "baseline": "dr_grpo"},
    {"baseline": "rloo"},
    {"group_over": "calls"},
    {"credit": "return_to_go", "group_over": "turns"},
    {"overlong": "punish", "overlong_penalty": 0.5},
    {"status_rewards": "timeout=-1"},
    {"baseline": "batch"},
    {"baseline": "running"},
    {"baseline": "rae"},
]


def _store(bench: Bench) -> None:
    """Two tasks with 4 and 3 rollouts: step rewards, failed and repeated tools, two agents, a truncated answer, a timeout."""
    for number, (task, reward) in enumerate([("one", 1.0), ("one", 0.0), ("one", 0.5), ("two", 1.0), ("two", 0.25)]):
        rollout = bench.rollout(f"r{number}", task=task, begins=10.0 * number, seconds=9.0)
        first = rollout.call(0, [1, 2, 3], [10 + number, 11], agent="planner")
        for turn in (1, 2):
            tool = {"gen_ai__operation__name": "execute_tool", "gen_ai__tool__call__arguments": '{"x": 1}'}
            rollout.span(f"tool{turn}", turn + 0.6, turn + 0.8, **tool, gen_ai__tool__name="run")
            rollout.spans[-1].failed = number % 2 == 0
            finish = {"gen_ai__response__finish_reasons": ["length"]} if number == 1 else {}
            rollout.call(turn, [1, 2, 3, 10, 11, turn], [20 + turn], agent="coder", **finish)
        rollout.reward(0.125 * number, on=first, at=1.2).reward(reward, at=8.0)
        rollout.reward(float(number % 2), at=8.5, **{"gen_ai.evaluation.name": "style"})
        bench.send(rollout)
    bench.send(chain(bench.rollout("slow", task="one", status="timeout", begins=60.0), 1))
    bench.send(chain(bench.rollout("other", task="two", begins=70.0), 2).reward(0.75))


def _sources(bench: Bench, settings: DatasetSettings | None = None) -> Sources:
    store = str(bench.collectors[0].store)
    places = ViewerPaths(bench.out.parent / "runs", bench.out)
    return Sources(places, StoreReader(store), Settings(dataset=settings or DatasetSettings()))


def _ask(bench: Bench, group_id: str, changes: Mapping[str, Any], name: str = "round-0000") -> GroupModel:
    query = {key: [str(value)] for key, value in changes.items()}
    return load_group(_sources(bench), Params("/g", {"dataset": name, "group": group_id}, query))


def _of_rows(made: pl.DataFrame) -> Advantages:
    return {(row[0], row[1]): row[2] for row in made.select("rollout_id", "call_index", "advantage").iter_rows()}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tried", [SETTINGS, pytest.param(MORE, marks=pytest.mark.slow)])
def test_the_numbers_are_those_of_a_dataset_made_whole(
    bench: Bench, tmp_path: Path, tried: list[dict[str, Any]]
) -> None:
    _store(bench)
    original = rows(bench.build(round_=0))
    group_id = original.filter(pl.col("task_id") == "one")["group_id"][0]
    plain = _ask(bench, group_id, {})
    assert plain.what_if.group is None
    assert _of_accounts(plain) == _of_rows(original.filter(pl.col("task_id") == "one"))
    assert len(plain.group.keys) == 4  # the one that timed out is a sibling, though it is not compared
    seen = set()
    for number, settings in enumerate(tried):
        whole = rows(bench.build(round_=0, out=tmp_path / f"out{number}", **settings))
        expected = _of_rows(whole.filter(pl.col("task_id") == "one"))
        asked = _ask(bench, group_id, settings)
        assert asked.what_if.error is None
        found = {(one.rollout_id, one.call): one.now[1] for one in asked.what_if.changes if one.now[2] is None}
        assert found == expected, settings
        assert _of_accounts(asked) == _of_accounts(plain)  # the page itself still shows what is
        seen.add(tuple(sorted(found.values())))
    assert len(seen) >= len(tried) - 2  # the settings differ in what they give


def test_choices_of_one_request_are_calls_of_their_own(bench: Bench) -> None:
    for number, reward in enumerate((0.0, 1.0)):
        rollout = bench.rollout(f"r{number}", task="one", begins=10.0 * number)
        for choice in (0, 1):
            on = rollout.call(0, [1, 2], [10 + choice], trainspan__choice__index=choice)
            rollout.reward(float(choice == number), on=on, at=1.5)
        rollout.call(1, [1, 2, 10, 3], [12])
        bench.send(rollout.reward(reward, at=8.0))
    built = rows(bench.build(round_=0, credit="return_to_go"))
    assert built["call_index"].to_list().count(0) == 4, "both choices have the index of their request"
    group_id = built["group_id"][0]
    asked = _ask(bench, group_id, {"gamma": 0.5})
    one, _ = asked.group.rollouts
    assert [call.index for call in one.calls] == [0, 1, 2]
    assert [call.completion_ids for call in one.calls] == [[10], [11], [12]]
    unchanged = _ask(bench, group_id, {"baseline": "grpo"}).what_if.changes
    assert len({(change.rollout_id, change.call) for change in unchanged}) == 6
    assert [change.now for change in unchanged] == [change.before for change in unchanged]


def _of_accounts(model: GroupModel) -> Advantages:
    return {
        (one.rollout_id, call.index): call.advantage
        for one in model.group.rollouts
        for call in one.calls
        if call.reason is None and call.advantage is not None
    }


def test_settings_that_make_no_sense_are_an_error_on_the_page(bench: Bench) -> None:
    _store(bench)
    made = rows(bench.build(round_=0))
    asked = _ask(bench, made["group_id"][0], {"credit": "gigpo", "baseline": "global"})
    assert asked.what_if.error is not None
    assert "compares calls from the same state" in asked.what_if.error
    assert asked.what_if.changes == []


def test_an_address_cannot_run_a_function(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    _store(bench)
    group_id = rows(bench.build(round_=0))["group_id"][0]
    monkeypatch.setattr("trainspan_schemas.agents.functions.load_function", lambda *_: pytest.fail("it was loaded"))
    for changes in (
        {"credit": "os:abort"},
        {"baseline": "tests.processing.support.estimates:nothing"},
        {"credit": "per_agent", "agent_credit": "*=os:abort"},
        {"credit": "per_agent", "agent_credit": "*=rloo,coder=os:abort+rloo"},
        {"reward": "os:abort"},
    ):
        if "reward" in changes:
            assert _ask(bench, group_id, changes).what_if.group is None  # it is not a setting of the form
            continue
        with pytest.raises(UsageError, match=r"not one of|runs only functions"):
            _ask(bench, group_id, changes)


def test_a_group_without_rows_is_found_by_its_tasks(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name, task="flat"), 1).reward(1.0) for name in "ab"))
    bench.send(
        *(chain(bench.rollout(name, task="mixed"), 1).reward(reward) for name, reward in (("c", 0.0), ("d", 1.0)))
    )
    bench.build(round_=0)
    by_rollout = load_group(_sources(bench), Params("/", {"rollout": f"{bench.run_id}-a"}, {"dataset": ["round-0000"]}))
    assert [call.reason for one in by_rollout.group.rollouts for call in one.calls] == ["zero_spread_group"] * 2
    row = {"rollout_id": "a", "attempt": 0, "run_id": bench.run_id, "round": 0, "task_id": "flat"}
    nothing = pl.DataFrame(schema={"rollout_id": pl.String, "attempt": pl.Int64, "prompt_hash": pl.String})
    group_id = with_groups(pl.DataFrame([row]), nothing)["group_id"][0]
    found = _ask(bench, group_id, {})
    assert found.group.keys == by_rollout.group.keys
    with pytest.raises(NotFoundError):
        _ask(bench, "0" * 16, {})


def test_only_the_task_is_read_unless_others_matter(bench: Bench) -> None:
    _store(bench)

    def read(**settings: Any) -> tuple[bool, set[str]]:
        question = Question(
            [str(bench.collectors[0].store)], f"{bench.run_id}-r0", DatasetSettings(**settings), whole=False
        )
        with inquire(question, bench.clock) as inquiry:
            return inquiry.is_narrow, set(inquiry.traces.rollouts["task_id"])

    assert read() == (True, {"one"})
    assert read(credit="gigpo", baseline="rloo") == (True, {"one"})
    for settings in ({"baseline": "batch"}, {"baseline": "running"}, {"combine": "gdpo"}, {"max_staleness": 3}):
        assert read(**settings) == (False, {"one", "two"}), settings
    assert set(baselines.BASELINES) == {"grpo", "dr_grpo", "rloo", "none", "batch", "global", "running", "rae"}


def test_a_part_of_a_large_group_is_explained_at_a_time(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(f"{number:02d}"), 1).reward(float(number % 3)) for number in range(11)))
    question = Question([str(bench.collectors[0].store)], f"{bench.run_id}-05", DatasetSettings(), whole=False)
    group = explain_group(question, bench.clock, start=8, most=8)
    assert len(group.keys) == 11
    assert [one.rollout_id for one in group.rollouts] == [f"{bench.run_id}-{number:02d}" for number in (8, 9, 10)]
    assert len(group.rollouts[0].credit.members) == 11
    model = load_rollout(
        _sources(bench), Params("/", {"rollout": f"{bench.run_id}-10"}, {"dataset": ["none"], "baseline": ["dr_grpo"]})
    )
    assert model.what_if.account(f"{bench.run_id}-10", 0) is not None
    assert {one.rollout_id for one in model.what_if.changes} == {one.rollout_id for one in group.rollouts}
