"""Which rollouts and states can be branched, what the server is given to repeat, and what the branches measured."""

from collections import Counter
from typing import Any

import polars as pl
import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import TestRollout, chain
from trainspan_cli.branching.branch_run import sampled_tokens
from trainspan_processing.branches.candidates import Candidates, find_candidates, measure, newest_round, rounds_of
from trainspan_processing.branches.choice import CallChoice, branch_points
from trainspan_processing.branches.states import GREEDY, IMAGES
from trainspan_processing.branches.stored_calls import StoredCallReader
from trainspan_processing.branches.values import StateBranches, StateValue, two_values
from trainspan_processing.explain.inquiry import NEWEST, _find
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.reasons.selection import select
from trainspan_processing.stored_rollout import StoredRollout
from trainspan_schemas.artifacts.branches import BranchPoint, branch_task_id
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import InvalidRecordError, UsageError
from trainspan_schemas.intervals import t_interval
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.prefix import prompt_digest
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs


def found(bench: Bench, *ids: str) -> Candidates:
    with bench.source() as source:
        selections = rounds_of(source, ids) if ids else [Selection(bench.run_id)]
        return find_candidates(source, selections, DatasetSettings(), ids or None, now_ns=bench.now)


def point(rollout: TestRollout, call: int) -> BranchPoint:
    return BranchPoint(rollout.rollout_id, 0, call, 0, {"id": rollout.task})


def branch(
    bench: Bench, of: TestRollout, call: int, number: int, reward: float | None, status: str = "ok"
) -> TestRollout:
    task = branch_task_id(str(of.task), of.rollout_id, 0, call)
    made = TestRollout(f"{of.rollout_id}-{call}-{number}", run=f"{bench.run_id}-branches", task=task, status=status)
    chain(made, 2)
    return made if reward is None else made.reward(reward)


def test_rollouts_that_cannot_be_branched_are_counted_by_reason(bench: Bench) -> None:
    good = chain(bench.rollout("good"), 2).reward(1.0)
    retried = chain(bench.rollout("again"), 1).reward(1.0), chain(bench.rollout("again", attempt=1), 1).reward(0.0)
    bench.send(
        good,
        *retried,
        chain(bench.rollout("silent"), 1),
        chain(bench.rollout("crashed", status="agent_error"), 1),
        chain(bench.rollout("open", status=None), 1),
        bench.rollout("mute").reward(1.0),
        chain(bench.rollout("loose", task=None), 1).reward(1.0),
        chain(bench.rollout("branch", task="t@r.0@1"), 1).reward(1.0),
        chain(bench.rollout("held", split="val"), 1).reward(1.0),
        chain(bench.rollout("a@b"), 1).reward(1.0),
    )
    candidates = found(bench)
    kept = candidates.rollouts.select("rollout_id", "attempt").rows()
    assert sorted(kept) == [(f"{bench.run_id}-again", 1), (good.rollout_id, 0)]
    reasons = {"retried": 1, "no reward": 2, "unfinished": 1, "no calls": 1, "no task": 1, "a branch itself": 1}
    reasons |= {"validation": 1, "@ in its id": 1}
    assert candidates.skipped == Counter(reasons)
    for name in (good.rollout_id, f"{bench.run_id}-held"):
        assert found(bench, name).rollouts["rollout_id"].to_list() == [name]


def test_states_have_surprisals_and_count_requests_not_choices(bench: Bench) -> None:
    rollout = bench.rollout("a").reward(1.0)
    for choice in (0, 1):
        more = {"trainspan.choice.index": choice, "gen_ai.response.id": "same"}
        rollout.call(0, [1], [2, 3], logprobs=[-1.0, -2.0 - choice], at=1.0, agent="x", **more)
    rollout.call(1, [1, 2], [4], logprobs=[-0.5], agent="y")
    rollout.call(2, [1, 2, 3], [5], logprobs=[-9.0], agent="x", **{"trainspan.call.delivered": False})
    rollout.call(3, [1, 2, 3, 4], [5], logprobs=[-0.25], agent="y")
    bench.send(rollout)
    states = found(bench).states
    assert states["call"].to_list() == [0, 1, 2, 3]
    assert states["surprisal"].to_list() == [(1 + 2 + 1 + 3) / 4, 0.5, 9.0, 0.25]
    assert states["can_repeat"].to_list() == [True, True, False, True]

    def points(text: str) -> tuple[list[int], int]:
        chosen, unreachable = branch_points(states, CallChoice.parse(text), states.clear())
        return chosen["call"].to_list(), unreachable.total()

    # State 3 is after a call that its client did not get. Nothing is known of state 0: the rollout has no group.
    assert points("all") == ([0, 1, 2], 1)
    assert points("agent:x") == ([0, 1, 2], 1)
    assert points("kind:sub_agent") == ([1, 2], 1)
    assert points("random:1") == points("all")
    for text in ("random:0", "random:1.5", "random:x", "random:-1", "entropy:2", "agent:", "some"):
        with pytest.raises(UsageError, match=r"use all, random:0\.25, agent:NAME"):
            CallChoice.parse(text)


def test_states_at_which_branches_would_be_equal_or_are_not_comparable_are_skipped_by_name(bench: Bench) -> None:
    rollout = bench.rollout("a").reward(1.0)
    for index, more in enumerate(({}, {keys.GEN_AI_TEMPERATURE: 0.0}, {}, {keys.GEN_AI_TEMPERATURE: 0.0})):
        rollout.call(index, [1, index], [2], **more)
    images = bench.rollout("b").reward(1.0)
    images.call(0, [1], [2])
    images.call(1, [1, 2], [3], **{keys.CALL_MULTIMODAL: True})
    bench.send(rollout, images)
    states = found(bench).states
    chosen, skipped = branch_points(states, CallChoice.parse("all"), states.clear())
    # A greedy call before a sampled one is part of what the branches sample.
    assert chosen["call"].to_list() == [0, 1, 2, 0]
    assert skipped == {GREEDY: 1, IMAGES: 1}


def test_whether_a_call_is_chosen_depends_on_its_place_alone() -> None:
    """Not on what was sampled, nor on how long the rollout became: else values are known where it went well, or badly."""

    def states(calls: int, surprisal: float, ids: int) -> pl.DataFrame:
        rows = [(f"r{number}", 0, call, surprisal * call) for number in range(ids) for call in range(calls)]
        return pl.DataFrame(rows, schema=["rollout_id", "attempt", "call", "surprisal"], orient="row")

    choice = CallChoice.parse("random:0.25")
    long, short = (choice.of(states(calls, sign, 400)) for calls, sign in ((10, 1.0), (3, -1.0)))
    same = long.filter(pl.col("call") < 3)
    assert same.select("rollout_id", "call").equals(short.select("rollout_id", "call"))
    assert long.height == pytest.approx(1000, abs=4 * (4000 * 0.25 * 0.75) ** 0.5)


def test_the_server_gets_the_calls_before_the_point_and_the_digests_of_those_after(bench: Bench) -> None:
    rollout = bench.rollout("a").reward(1.0)
    for choice in (0, 1):
        more = {"trainspan.choice.index": choice, "gen_ai.response.id": "same"}
        rollout.call(0, [1], [10 + choice], at=1.0, version=3, logprobs=[-0.5], **more)
    rollout.call(1, [1, 2], [12, 13], logprobs=[-1.0, -2.0], **{"gen_ai.response.finish_reasons": ["length"]})
    rollout.call(2, [1, 2, 3], [14])
    bench.send(rollout)
    candidates = found(bench)
    with bench.source() as source:
        reader = StoredCallReader(source, candidates.calls)
        stored = reader.calls(point(rollout, 2))
        with pytest.raises(InvalidRecordError, match="has 3 calls, no call 3"):
            reader.calls(point(rollout, 3))
        assert reader.calls(point(rollout, 0)).repeated == ()
    first, second = stored.repeated
    assert (first.index, first.prompt, first.version) == (0, encode_ids([1]), 3)
    assert [choice.ids for choice in first.choices] == [encode_ids([10]), encode_ids([11])]
    assert second.choices[0].logprobs == encode_logprobs([-1.0, -2.0])
    assert [choice.finish_reason for choice in (*first.choices, *second.choices)] == ["stop", "stop", "length"]
    assert stored.later == (prompt_digest(encode_ids([1, 2, 3])),)
    assert stored.point == encode_ids([1, 2, 3])


def test_values_and_advantages_come_from_rewarded_branches_and_the_group(bench: Bench) -> None:
    one, other = chain(bench.rollout("a"), 3).reward(1.0), chain(bench.rollout("b"), 2).reward(0.0)
    branches = [branch(bench, one, 1, number, reward) for number, reward in enumerate([1.0, 1.0, 1.0, 0.0])]
    branches += [branch(bench, one, 2, number, reward) for number, reward in enumerate([0.0, 1.0])]
    branches += [branch(bench, one, 2, number, None, "diverged") for number in (2, 3)]
    bench.send(one, other, *branches)
    candidates = found(bench)
    points = [point(one, 1), point(one, 2)]
    with bench.source() as source:
        measured = measure(source, f"{bench.run_id}-branches", points, candidates, DatasetSettings(), now_ns=bench.now)
    first, second = measured
    values = [(call.value.mean, call.value.n, call.value.by) for call in first.calls if call.value]
    assert values == [(0.5, 2, "group"), (0.75, 4, "branches"), (0.5, 2, "branches")]
    assert [call.advantage for call in first.calls] == [0.25, -0.25, 0.5]
    assert [dict(call.status) for call in first.calls] == [{}, {"ok": 4}, {"diverged": 2, "ok": 2}]
    assert not first.is_other_policy
    # Wilson's intervals: of 1 of 2 successes .0945 to .9055, of 3 of 4 .3006 to .9544; the difference by Newcombe.
    low, high = first.calls[0].interval or (0.0, 0.0)
    assert low == pytest.approx(0.25 - ((0.75 - 0.3006) ** 2 + (0.9055 - 0.5) ** 2) ** 0.5, abs=1e-3)
    assert high == pytest.approx(0.25 + ((0.9544 - 0.75) ** 2 + (0.5 - 0.0945) ** 2) ** 0.5, abs=1e-3)
    # The other rollout has no branches: only its first state is known.
    assert [call.advantage for call in second.calls] == [None, None]


def measured(bench: Bench, points: list[BranchPoint], **settings: Any) -> list[list[float | None]]:
    """The values of the states of every rollout."""
    dataset = DatasetSettings(**settings)
    with bench.source() as source:
        candidates = find_candidates(source, [Selection(bench.run_id)], dataset, None, now_ns=bench.now)
        rollouts = measure(source, f"{bench.run_id}-branches", points, candidates, dataset, now_ns=bench.now)
    return [[call.value.mean if call.value else None for call in rollout.calls] for rollout in rollouts]


def test_a_state_with_branches_that_failed_without_a_reward_has_no_value(bench: Bench) -> None:
    """The mean of the others would be that of the branches that went well."""
    one = chain(bench.rollout("a"), 3).reward(0.5)
    crashed = [branch(bench, one, 1, number, None, "agent_error") for number in (1, 2, 3)]
    broken = branch(bench, one, 2, 1, None, "infra_error")  # says nothing about the policy
    bench.send(one, branch(bench, one, 1, 0, 1.0), *crashed, branch(bench, one, 2, 0, 0.25), broken)
    points = [point(one, 1), point(one, 2)]
    assert measured(bench, points) == [[None, None, 0.25]]
    assert measured(bench, points, status_rewards="agent_error=0") == [[None, 0.25, 0.25]]
    with bench.source() as source:
        run = f"{bench.run_id}-branches"
        [rollout] = measure(source, run, points, found(bench), DatasetSettings(), now_ns=bench.now)
    call = rollout.calls[1]
    assert (call.unrewarded, dict(call.status), call.advantage) == (3, {"agent_error": 3, "ok": 1}, None)


def refused(rollout: StoredRollout) -> bool:
    return "-1-" not in rollout.rollout_id  # the branches from state 1


def test_branches_that_ended_ok_without_a_reward_take_the_value_away_and_no_filter_chooses_among_branches(
    bench: Bench,
) -> None:
    one = chain(bench.rollout("a"), 3).reward(0.5)
    silent = [branch(bench, one, 1, 1, None), branch(bench, one, 2, 1, None, "judge_error")]
    bench.send(one, branch(bench, one, 1, 0, 1.0), branch(bench, one, 2, 0, 1.0), *silent)
    points = [point(one, 1), point(one, 2)]
    assert measured(bench, points) == [[None, None, None]]
    assert measured(bench, points, status_rewards="judge_error=0") == [[None, None, 0.5]]
    assert measured(bench, points, reward=f"{__name__}:half") == [[None, 0.5, 0.5]]
    assert measured(bench, points, reward=f"{__name__}:half", filter=f"{__name__}:refused") == [[None, 0.5, 0.5]]
    assert measured(bench, points, reward=f"{__name__}:half", split="0.999") == [[None, 0.5, 0.5]]


def half(rollout: StoredRollout) -> float:
    return 0.5


def test_branches_that_diverged_are_no_evidence_even_with_a_reward_by_status(bench: Bench) -> None:
    one = chain(bench.rollout("a"), 2).reward(0.5)
    bench.send(one, branch(bench, one, 1, 0, 1.0), branch(bench, one, 1, 1, None, "diverged"))
    assert measured(bench, [point(one, 1)], status_rewards="diverged=0") == [[None, 1.0]]


def test_rollouts_that_no_runner_began_are_neither_branches_nor_of_a_group(bench: Bench) -> None:
    """An agent knows the task id of its branch and may send rollouts with it."""
    one, other = chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("b"), 2).reward(0.0)
    forged = [branch(bench, one, 1, number, None, "agent_error") for number in range(1, 4)]
    forged.append(chain(bench.rollout("c"), 1).reward(0.0))
    for rollout in forged:
        rollout.root_span.attributes[keys.ROLLOUT_BOUNDARY] = "process"
    bench.send(one, other, branch(bench, one, 1, 0, 1.0), *forged)
    for settings in ({}, {"status_rewards": "agent_error=0"}):
        assert measured(bench, [point(one, 1)], **settings)[:2] == [[0.5, 1.0], [0.5, None]]


def test_the_group_of_a_rollout_is_that_of_its_split(bench: Bench) -> None:
    one, other = chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("b"), 2).reward(0.0)
    bench.send(one, other, chain(bench.rollout("c", split="val"), 2).reward(0.0))
    assert measured(bench, []) == [[0.5, None], [0.5, None]]


def test_branches_of_another_version_have_no_group_value_to_be_compared_with(bench: Bench) -> None:
    one, other = chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("b"), 2).reward(0.0)
    newer = branch(bench, one, 1, 0, 0.75)
    for span in newer.spans[1:]:
        span.attributes[keys.POLICY_VERSION] = 4
    bench.send(one, other, newer)
    assert measured(bench, [point(one, 1)]) == [[None, 0.75], [0.5, None]]


def test_advantages_are_of_rewards_with_the_penalties_that_are_set(bench: Bench) -> None:
    one, other = chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("b"), 2).reward(0.0)
    for rollout in (one, made := branch(bench, one, 1, 0, 1.0)):
        rollout.span("tool", 1.6, 1.8, **{"gen_ai.operation.name": "execute_tool"})  # after call 0
        rollout.spans[-1].failed = True
    bench.send(one, other, made)
    dataset = DatasetSettings(air="tool_error=-0.2")
    with bench.source() as source:
        candidates = find_candidates(source, [Selection(bench.run_id)], dataset, None, now_ns=bench.now)
        rollouts = measure(source, f"{bench.run_id}-branches", [point(one, 1)], candidates, dataset, now_ns=bench.now)
    first, second = rollouts[0].calls
    # The group earned .8 and 0, the branch .8.
    assert (first.advantage, second.advantage) == (pytest.approx(0.8 - 0.4), 0.0)


def test_the_tokens_of_a_rounds_branches_leave_out_other_rounds_and_repeated_answers(bench: Bench) -> None:
    origin = chain(bench.rollout("a"), 2).reward(1.0)
    made = []
    for round_, tokens in ((1, [4, 5, 6]), (2, [7, 8])):
        one = bench.rollout(f"b{round_}", task=branch_task_id("t0", origin.rollout_id, 0, 1), round=round_)
        one.call(0, [1], [2, 3], **{keys.CALL_FORCED: True})
        one.call(1, [1, 2, 3], tokens)
        made.append(one)
    bench.send(origin, *made)
    with bench.source() as source:
        assert [sampled_tokens(source, bench.run_id, rounds) for rounds in ((1,), (2,), (1, 2))] == [3, 2, 5]


def test_rewards_of_two_values_have_wilsons_interval_and_equal_ones_of_unknown_spread_none() -> None:
    assert two_values([0.0, 0.0]) == two_values([1.0, 0.0]) == (0.0, 1.0)
    assert two_values([-1.0, 2.0, -1.0, 2.0]) == (-1.0, 2.0)
    assert two_values([0.3, 0.7]) is None  # two of many
    assert two_values([0.5, 0.5]) is None

    def interval(rewards: list[float], run: list[float]) -> tuple[float, float] | None:
        value = StateValue.of(StateBranches(rewards), "branches", two_values(run))
        assert value is not None
        return value.interval

    # Four of four: Wilson's lower end is 4 / (4 + 1.959964²) = .5101, here of a scale from −1 to 2.
    assert interval([2.0] * 4, [-1.0, -1.0, 2.0, 2.0]) == pytest.approx((-1 + 3 * 0.5101, 2.0), abs=1e-3)
    assert interval([0.8] * 4, [0.8, 1.0, 0.0, 0.4]) is None
    assert interval([1.0] * 4, [0.8, 1.0, 0.0, 0.4]) is None  # a success rate only if all rewards of the run are 0 or 1
    assert interval([1.0, 0.0], [0.8, 1.0, 0.0, 0.4]) == t_interval([1.0, 0.0])
    # 0 and .5: mean .25, s = .35355, t(1) = 12.7062
    half = 12.7062 * 0.35355 / 2**0.5
    assert interval([0.0, 0.5], [0.0, 0.5, 0.7]) == pytest.approx((0.25 - half, 0.25 + half), abs=1e-3)


def test_a_sample_of_rollouts_does_not_depend_on_their_order(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(1.0) for name in "abcdefgh"))
    candidates = found(bench)
    sampled = candidates.sample(3)
    assert sampled.rollouts.height == 3
    assert sampled.states["rollout_id"].n_unique() == sampled.calls["rollout_id"].n_unique() == 3
    assert candidates.sample(3).rollouts.equals(sampled.rollouts)
    assert candidates.sample(None) is candidates.sample(8) is candidates


def test_the_newest_round_is_never_one_of_branches(bench: Bench) -> None:
    rollout = chain(bench.rollout("a", round=7, begins=1e6), 1).reward(1.0)
    bench.send(rollout, chain(TestRollout("later", run="other", task="t@r.0@1", begins=2e6), 1).reward(1.0))
    with bench.source() as source:
        assert newest_round(source) == Selection(bench.run_id, 7)


def test_the_newest_round_and_rollout_are_those_of_all_stores(bench: Bench) -> None:
    for store, (name, round_, begins) in enumerate((("old", 3, 1e7), ("new", 2, 2e7))):
        bench.send(chain(bench.rollout(name, round=round_, begins=begins), 1).reward(1.0), store=store)
    for stores in ((0, 1), (1, 0)):
        paths = [str(bench.collectors[store].store) for store in stores]
        with Source(paths) as source:
            assert newest_round(source) == Selection(bench.run_id, 2)
            assert _find(source, NEWEST, None).rollout_id == f"{bench.run_id}-new"


def test_rewards_that_a_dataset_refuses_are_no_value_of_a_state(bench: Bench) -> None:
    """One reward of 1e30 is beyond `max_reward`, and a score is no number."""
    one, other = chain(bench.rollout("a"), 3).reward(1.0), chain(bench.rollout("b"), 2).reward(0.0)
    huge = chain(bench.rollout("c"), 2).reward(1e30)
    broken = chain(bench.rollout("d"), 2).reward(0.5).reward(float("nan"))
    branches = [branch(bench, one, 1, number, reward) for number, reward in enumerate([1.0, 0.0, 1e30])]
    branches += [branch(bench, one, 2, number, reward) for number, reward in enumerate([1.0, 0.0])]
    bench.send(one, other, huge, broken, *branches)
    candidates = found(bench)
    assert candidates.skipped == {"reward_out_of_range": 1, "invalid_reward": 1}
    assert candidates.group_rewards["rewards"].list.sort().to_list() == [[0.0, 1.0]]
    assert measured(bench, [point(one, 1), point(one, 2)]) == [[0.5, None, 0.5], [0.5, None]]


def test_a_policy_that_only_the_branches_used_is_compared_with_the_round(bench: Bench) -> None:
    """Else a rollout's values would count or not by whether it called the other policy, which is an outcome."""

    def asked(rollout: TestRollout, name: str, version: int) -> TestRollout:
        rollout.call(2, [5, 6], [7], **{keys.POLICY_NAME: name, keys.POLICY_VERSION: version})
        return rollout

    one, other = chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("b"), 2).reward(0.0)
    points = [point(one, 1)]
    bench.send(one, other, asked(branch(bench, one, 1, 0, 0.75), "coder", 3))
    assert measured(bench, points) == [[0.5, 0.75], [0.5, None]]  # nobody else asked the coder
    third = asked(chain(bench.rollout("c", task="t1"), 2), "coder", 3).reward(0.0)
    bench.send(third, asked(bench.rollout("d", task="t@r.0@1"), "coder", 2))  # branches of the round do not count
    assert measured(bench, points)[:2] == [[0.5, 0.75], [0.5, None]]
    bench.send(asked(branch(bench, one, 1, 1, 0.25), "coder", 4))
    assert measured(bench, points)[:2] == [[None, 0.5], [0.5, None]]


def test_a_share_of_the_tasks_puts_branches_on_the_side_of_their_rollouts_task(bench: Bench) -> None:
    tasks = [f"task {number}" for number in range(12)]
    bench.send(
        *(chain(bench.rollout(f"o{task}", task=task), 1) for task in tasks),
        *(chain(bench.rollout(f"b{task}", task=branch_task_id(task, "r.1", 0, 1)), 1) for task in tasks),
    )
    with bench.source() as source:
        sides = select(source, bench.traces(), DatasetSettings(split="0.5")).rollouts
    side_of = dict(sides.select("task_id", "split").iter_rows())
    assert {side_of[task] for task in tasks} == {"train", "val"}
    assert [side_of[branch_task_id(task, "r.1", 0, 1)] for task in tasks] == [side_of[task] for task in tasks]


def test_a_state_says_how_long_the_calls_before_it_took(bench: Bench) -> None:
    rollout = bench.rollout("a").reward(1.0)
    for index, at in enumerate([1.0, 1.25, 5.0, 9.0]):  # half a second each, the first two in part at the same time
        rollout.call(index, [1, index], [2], at=at)
    bench.send(rollout)
    assert found(bench).states["answered_s"].to_list() == [0.0, 0.5, 0.75, 1.25]
