"""Credit from trees of rollouts: worked by hand, its limits, and what it is refused with."""

import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.processing.conftest import Bench, rows
from tests.processing.support.estimates import Rollout, advantages, estimate
from trainspan_processing.credit.plan import make_plan
from trainspan_processing.explain.explain import explain_rollout
from trainspan_processing.explain.inquiry import Question
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError

RTMC = {"credit": "rtmc", "baseline": "dr_grpo"}


def test_an_action_is_worth_its_mean_return_less_that_of_its_state_drawn_towards_the_groups_mean() -> None:
    # Group: R = 1, 1, 0, 0, V_0 = .5. State s: action x returns 1, 0, action y returns 1, 0: V = .5, so V' = .5.
    # State t (after x, rollouts 0 and 2): y returns 1, z returns 0, V = .5, V' = .5; u (rollouts 1 and 3): z, both: 1, 0.
    rollouts = [
        Rollout(1.0, [None] * 2, states="st", actions="xy"),
        Rollout(1.0, [None] * 2, states="su", actions="yz"),
        Rollout(0.0, [None] * 2, states="st", actions="xz"),
        Rollout(0.0, [None] * 2, states="su", actions="yz"),
    ]
    assert advantages(rollouts, **RTMC) == [0.0, 0.5, 0.0, 0.0, 0.0, -0.5, 0.0, 0.0]


def test_a_state_that_was_visited_once_is_compared_mostly_with_the_group() -> None:
    # R = 1, 0, 0, 0, V_0 = .25. State s: x returns 1, y 0: V = 1/4. Rollout 0 alone is in t: V = 1, V' = (1 + 2 · .25) / 3 = .5.
    rollouts = [Rollout(1.0, [None] * 2, states="st", actions="xx")]
    rollouts += [Rollout(0.0, [None], states="s", actions="y") for _ in range(3)]
    assert advantages(rollouts, **RTMC) == pytest.approx([0.75, 0.5, -0.25, -0.25, -0.25])


def test_only_the_first_visit_of_a_rollout_counts_and_returns_are_discounted() -> None:
    # γ = .5, R = 1, 0, V_0 = .5. Rollout 0 makes x in s at calls 0 and 1, then y: the first visit returns .25, rollout 1 makes
    # x once: 0. Q(s, x) = .125; Q(s, y) = 1; visits of s: .25, 1, 0: V = 1.25/3, V' = (1.25 + 2 · .5) / 5 = .45.
    rollouts = [Rollout(1.0, [None] * 3, states="sss", actions="xxy"), Rollout(0.0, [None], states="s", actions="x")]
    assert advantages(rollouts, gamma=0.5, **RTMC) == pytest.approx([-0.325, -0.325, 0.55, -0.325])


def test_rewards_of_calls_are_part_of_the_return_from_their_call_on() -> None:
    # R = 1 + 1 and 0, V_0 = 1. State t: returns 1 and 0, V = .5, V' = (1 + 2) / 4 = .75.
    rollouts = [
        Rollout(1.0, [1.0, None], states="st", actions="xx"),
        Rollout(0.0, [None, None], states="st", actions="xy"),
    ]
    assert advantages(rollouts, **RTMC) == [0.0, 0.25, 0.0, -0.75]


_LETTERS = st.lists(st.tuples(st.sampled_from("stu"), st.sampled_from("xy")), min_size=1, max_size=5)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(_LETTERS, st.sampled_from([0.0, 0.25, 1.0])), min_size=2, max_size=6),
    st.sampled_from([1.0, 0.5]),
)
def test_it_is_the_papers_equation_for_rewards_at_the_end(
    played: list[tuple[list[tuple[str, str]], float]], gamma: float
) -> None:
    assume(len({reward for _, reward in played}) > 1)
    visits = [
        (call, gamma ** (len(calls) - 1 - calls.index(call)) * reward)
        for calls, reward in played
        for call in set(calls)
    ]

    def expected(call: tuple[str, str]) -> float:
        action = [found for other, found in visits if other == call]
        state = [found for (other, _), found in visits if other == call[0]]
        start = statistics.mean(reward for _, reward in played)
        return statistics.mean(action) - (sum(state) + 2 * start) / (len(state) + 2)

    rollouts = [
        Rollout(reward, [None] * len(calls), states="".join(s for s, _ in calls), actions="".join(a for _, a in calls))
        for calls, reward in played
    ]
    found = advantages(rollouts, gamma=gamma, **RTMC)
    assert found == pytest.approx([expected(call) for calls, _ in played for call in calls], abs=1e-12)


def test_groups_are_trees_of_their_own() -> None:
    pair = [Rollout(1.0, [None], states="s", actions="x"), Rollout(0.0, [None], states="s", actions="y")]
    other = [Rollout(8.0, [None], states="s", actions="x", group=1), Rollout(0.0, [None], states="s", group=1)]
    assert advantages([*pair, *other], **RTMC)[:2] == advantages(pair, **RTMC) == [0.5, -0.5]


def test_a_group_without_contrast_says_nothing() -> None:
    alike = [Rollout(1.0, [None], actions="x"), Rollout(1.0, [None], actions="y")]
    for rollouts, reason in ((alike, "zero_spread_group"), (alike[:1], "singleton_group")):
        found = estimate(rollouts, **RTMC).calls
        assert set(found["advantage"]) == {0.0}
        assert set(found["drop"]) == {reason}


def test_what_it_cannot_be_combined_with_is_refused() -> None:
    for baseline in ("grpo", "rloo", "running", "none"):
        with pytest.raises(UsageError, match=f"which baseline '{baseline}' does not: use baseline dr_grpo"):
            make_plan(DatasetSettings(credit="rtmc", baseline=baseline), has_tasks=True)
    for other in ({"combine": "gdpo"}, {"group_over": "turns"}):
        with pytest.raises(UsageError, match="leave agent_credit, combine and group_over at their defaults"):
            make_plan(DatasetSettings(credit="rtmc", **other), has_tasks=True)
    with pytest.raises(UsageError, match="leave agent_credit"):
        make_plan(DatasetSettings(credit="per_agent", agent_credit="a=rtmc+dr_grpo", baseline="rloo"), has_tasks=True)
    assert make_plan(DatasetSettings(credit="rtmc"), has_tasks=False).estimator.baseline == "dr_grpo"


def test_actions_of_stored_calls_are_their_sampled_tokens_and_states_their_prompts(bench: Bench) -> None:
    for name, first, reward in (("a", 10, 1.0), ("b", 10, 0.0), ("c", 11, 0.0), ("d", 11, 0.0)):
        rollout = bench.rollout(name).reward(reward)
        rollout.call(0, [1, 2], [first])
        rollout.call(1, [1, 2, first, 7], [int(reward) + 20])
        bench.send(rollout)
    made = rows(bench.build(round_=0, credit="rtmc")).sort("rollout_id", "call_index")
    # V_0 = .25 = V(s_0), Q(10) = .5, Q(11) = 0. After 10: V = .5, V' = (1 + .5) / 4 = .375; after 11: V = 0, V' = .5 / 4.
    expected = [0.25, 0.625, 0.25, -0.375, -0.25, -0.125, -0.25, -0.125]
    assert made["advantage"].to_list() == pytest.approx(expected)
    question = Question((str(bench.collectors[0].store),), f"{bench.run_id}-a", DatasetSettings(credit="rtmc"))
    lines = explain_rollout(question, bench.clock).credit.lines
    assert lines[1].startswith("credit rtmc: mean return of the action in the state − ")
    assert lines[-2:] == ["A(call 0) = 0.5 − 0.25 = 0.25", "A(call 1) = 1 − 0.375 = 0.625"]
