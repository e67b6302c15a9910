"""Datasets and explanations with values that branches measured."""

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain, measured_with
from trainspan_processing.explain.explain import explain_rollout
from trainspan_processing.explain.inquiry import Question
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.telemetry import keys


def test_a_dataset_with_credit_vine_uses_the_latest_measured_values(bench: Bench) -> None:
    one, other = bench.rollout("a"), chain(bench.rollout("b"), 1).reward(0.0)
    spans = [one.call(index, [1, index], [2]) for index in range(3)]
    one.reward(1.0)
    for at, value in ((200.0, 0.1), (201.0, 0.75)):
        one.log_reward(
            value,
            span_id=spans[1],
            at=at,
            **{keys.EVALUATION_NAME: keys.STATE_VALUE, **measured_with("policy 0")},
        )
    one.log_reward(0.25, span_id=spans[1], at=202.0, **{keys.EVALUATION_NAME: keys.CALL_ADVANTAGE})
    bench.send(one, other)
    built = bench.build(round_=0, credit="vine")
    made = rows(built).sort("rollout_id", "call_index")
    # V(s_0) = .5 from the group, V(s_1) = .75; nothing is known of state 2, so calls 1 and 2 share 1 − .75.
    assert made["advantage"].to_list() == pytest.approx([0.25, 0.25, 0.25, -0.5])
    assert made["reward"].to_list() == rows(bench.build(round_=0, out=bench.out / "plain"))["reward"].to_list()
    account = explain_rollout(
        Question((str(bench.collectors[0].store),), one.rollout_id, DatasetSettings(credit="vine")),
        bench.clock,
    )
    lines = "\n".join(account.credit.lines)
    assert "A(call 0) = 0.75 − 0.5 = 0.25" in lines
    assert "A(calls 1 to 2) = 1 − 0.75 = 0.25" in lines
    assert [edge.name for edge in account.edges] == ["reward"]
    assert account.credit.reward == 1.0


def test_values_of_another_policy_version_are_not_used_and_counted(bench: Bench) -> None:
    one, other = bench.rollout("a"), chain(bench.rollout("b"), 1).reward(0.0)
    spans = [one.call(index, [1, index], [2], version=3) for index in range(3)]
    one.reward(1.0)
    said = {1: (["policy 3"], 0.75, 200.0), 2: (["policy 4"], 0.25, 201.0)}
    for index, (policies, value, at) in said.items():
        name = {keys.EVALUATION_NAME: keys.STATE_VALUE, **measured_with(*policies)}
        one.log_reward(value, span_id=spans[index], at=at, **name)
    # A newer measurement by a later version does not replace the one that counts.
    later = {keys.EVALUATION_NAME: keys.STATE_VALUE, **measured_with("policy 4"), keys.MEASURED_BY: "later"}
    one.log_reward(0.0, span_id=spans[1], at=300.0, **later)
    bench.send(one, other)
    built = bench.build(round_=0, credit="vine")
    made = rows(built).sort("rollout_id", "call_index")
    assert made["advantage"].to_list() == pytest.approx([0.25, 0.25, 0.25, -0.5])
    assert built.manifest["ignored_values"] == 1


def test_values_of_another_reward_are_not_used_and_counted(bench: Bench) -> None:
    one, other = bench.rollout("a"), chain(bench.rollout("b"), 1).reward(0.0)
    spans = [one.call(index, [1, index], [2]) for index in range(3)]
    for at, (index, value, settings) in enumerate([(1, 0.75, {}), (2, 0.25, {"air": "tool_error=-0.2"})]):
        name = {keys.EVALUATION_NAME: keys.STATE_VALUE, **measured_with("policy 0", **settings)}
        one.log_reward(value, span_id=spans[index], at=200.0 + at, **name)
    bench.send(one.reward(1.0), other)
    expected = {"": [0.25, 0.25, 0.25], "tool_error=-0.20": [-0.25, -0.25, 0.75], "tool_error=-0.1": [0.5, 0.5, 0.5]}
    for air, advantages in expected.items():
        built = bench.build(round_=0, credit="vine", air=air or None, out=bench.out / (air or "none"))
        made = rows(built).filter(rollout_id=one.rollout_id).sort("call_index")
        assert made["advantage"].to_list() == pytest.approx(advantages)
        assert built.manifest["ignored_values"] == (2 if air.endswith("0.1") else 1)


def test_values_count_whether_or_not_their_rollout_used_each_policy_of_its_branches(bench: Bench) -> None:
    one, other = bench.rollout("a"), bench.rollout("b")
    spans = [one.call(index, [1, index], [2], version=3) for index in range(3)]
    other.call(0, [1], [2], version=3)
    other.call(1, [1, 2], [2], version=5, **{keys.POLICY_NAME: "coder"})
    said = {1: (["coder 5", "policy 3"], 0.75), 2: (["coder 6", "policy 3"], 0.25)}
    for index, (policies, value) in said.items():
        name = {keys.EVALUATION_NAME: keys.STATE_VALUE, **measured_with(*policies)}
        one.log_reward(value, span_id=spans[index], at=200.0, **name)
    bench.send(one.reward(1.0), other.reward(0.0))
    built = bench.build(round_=0, credit="vine", policies="policy")
    made = rows(built).filter(rollout_id=one.rollout_id).sort("call_index")
    assert made["advantage"].to_list() == pytest.approx([0.25, 0.25, 0.25])
    assert built.manifest["ignored_values"] == 1


def test_branches_of_one_state_are_a_group_and_their_repeated_calls_are_dropped(bench: Bench) -> None:
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name, task="t@origin.0@1").reward(reward)
        rollout.call(0, [1], [2], **{"trainspan.call.forced": True})
        rollout.call(1, [1, 2, 3], [4])
        bench.send(rollout)
    bench.send(chain(bench.rollout("c", task="t"), 1).reward(5.0), chain(bench.rollout("d", task="t"), 1).reward(3.0))
    built = bench.build(round_=0, baseline="dr_grpo")
    assert built.manifest["dropped"] == {"forced": 2}
    assert built.manifest["coverage"] == 1.0
    # Rewards are those of the task's own rollouts: branches begin in chosen states.
    assert (built.manifest["rewards"]["n"], built.manifest["rewards"]["mean"]) == (2, 4.0)
    assert built.manifest["distributions"]["reward"]["n"] == 2
    made = rows(built).sort("rollout_id")
    assert made.select("task_id", "call_index", "advantage").rows() == [
        ("t@origin.0@1", 1, 0.5),
        ("t@origin.0@1", 1, -0.5),
        ("t", 0, 1.0),
        ("t", 0, -1.0),
    ]
