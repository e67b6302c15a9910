"""Each row of the two tables of estimators, and their combinations, worked by hand."""

import math

import polars as pl
import pytest

from tests.processing.support.estimates import Rollout, advantages, estimate
from trainspan_processing.credit.plan import make_plan
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError

EPS = 1e-4


def _whole(*rewards: float, group: int = 0) -> list[Rollout]:
    """Rollouts with one call and one reward each."""
    return [Rollout(reward, [None], group=group) for reward in rewards]


def test_identical_and_grpo_give_all_calls_of_a_rollout_its_distance_in_group_spreads() -> None:
    # R = 1, 3, 5: μ = 3, σ = √((4 + 0 + 4)/2) = 2
    rollouts = [Rollout(1.0, [None, None]), Rollout(2.5, [0.5]), Rollout(5.0, [None])]
    expected = [-2 / (2 + EPS), -2 / (2 + EPS), 0.0, 2 / (2 + EPS)]
    assert advantages(rollouts) == pytest.approx(expected)


def test_return_to_go_and_rloo_subtract_the_mean_of_the_other_rollouts() -> None:
    # a: r = .5, 0, and 1 at the end: G = 1.5, 1; R = 1.5. b: R = .5. c: R = 1
    rollouts = [Rollout(1.0, [0.5, None]), Rollout(0.5, [None]), Rollout(1.0, [None])]
    # others of a: (.5 + 1)/2 = .75; of b: (1.5 + 1)/2 = 1.25; of c: (1.5 + .5)/2 = 1
    found = advantages(rollouts, credit="return_to_go", baseline="rloo")
    assert found == pytest.approx([1.5 - 0.75, 1.0 - 0.75, 0.5 - 1.25, 1.0 - 1.0])


def test_return_to_go_with_a_discount() -> None:
    # a: G = .5 + .5·(0 + .5·1) = .75, .5, 1; compared with whole returns R = 1.5 and 0
    rollouts = [Rollout(1.0, [0.5, None, None]), Rollout(0.0, [None])]
    found = advantages(rollouts, credit="return_to_go", baseline="dr_grpo", gamma=0.5)
    assert found == pytest.approx([0.75 - 0.75, 0.5 - 0.75, 1.0 - 0.75, -0.75])


def test_step_compares_calls_of_the_same_turn() -> None:
    rollouts = [Rollout(None, [1.0, 0.0]), Rollout(None, [0.0, 3.0]), Rollout(1.0, [2.0])]
    # turn 0: 1, 0, 2 + 1 (the rollout's own reward, on its last call): μ = 4/3; turn 1: 0, 3: μ = 1.5
    found = advantages(rollouts, credit="step", baseline="dr_grpo")
    assert found == pytest.approx([1 - 4 / 3, -1.5, -4 / 3, 1.5, 3 - 4 / 3])


def test_step_compares_calls_of_the_same_agent_if_set() -> None:
    rollouts = [Rollout(None, [1.0, 0.0], agents="ab"), Rollout(None, [3.0, 2.0], agents="ab")]
    rollouts[1].agents = "ba"
    # a: 1 and 2, μ = 1.5; b: 0 and 3, μ = 1.5
    found = advantages(rollouts, credit="step", baseline="dr_grpo", step_by="agent")
    assert found == pytest.approx([-0.5, -1.5, 1.5, 0.5])


def test_a_call_without_a_step_reward_is_compared_with_nothing_and_is_no_zero() -> None:
    rollouts = [Rollout(None, [1.0, None]), Rollout(None, [3.0, 5.0])]
    credited = estimate(rollouts, credit="step", baseline="dr_grpo")
    rows = credited.calls.sort("rollout", "position").select("rollout", "position", "advantage", "drop").rows()
    assert rows == [(0, 0, -1.0, None), (1, 0, 1.0, None), (1, 1, 0.0, "singleton_group")]


def test_gigpo_adds_the_comparison_from_the_same_state_to_that_of_the_episode() -> None:
    rollouts = [
        Rollout(None, [None, 1.0], states="xy"),  # R = 1, G = 1, 1
        Rollout(None, [0.5, 0.0], states="xz"),  # R = .5, G = .5, 0
        Rollout(0.0, [None, None], states="xy"),  # R = 0, G = 0, 0
    ]
    # episode: μ = .5; state x: 1, .5, 0, μ = .5; state y: 1, 0, μ = .5; state z: one call, nothing to compare with
    plain = advantages(rollouts, credit="gigpo", baseline="dr_grpo")
    assert plain == pytest.approx([0.5 + 0.5, 0.5 + 0.5, 0.0 + 0.0, 0.0, -0.5 - 0.5, -0.5 - 0.5])
    weighted = advantages(rollouts, credit="gigpo", baseline="dr_grpo", episode_weight=2.0, state_weight=0.1)
    assert weighted == pytest.approx([1.05, 1.05, 0.0, 0.0, -1.05, -1.05])
    # with grpo: episode σ = .5; x: σ = .5; y: σ = √.5
    normed = advantages(rollouts, credit="gigpo", baseline="grpo")
    assert normed[1] == pytest.approx(0.5 / (0.5 + EPS) + 0.5 / (math.sqrt(0.5) + EPS))


def test_gigpo_discounts_the_return_from_the_state() -> None:
    rollouts = [Rollout(1.0, [None, None], states="xy"), Rollout(0.0, [None, None], states="xy")]
    # G = .5, 1 and 0, 0; R = 1 and 0
    found = advantages(rollouts, credit="gigpo", baseline="dr_grpo", gamma=0.5)
    assert found == pytest.approx([0.5 + 0.25, 0.5 + 0.5, -0.5 - 0.25, -0.5 - 0.5])


def test_gigpo_keeps_a_call_whose_episodes_are_alike_but_whose_states_are_not() -> None:
    rollouts = [Rollout(None, [1.0, 0.0], states="xy"), Rollout(None, [0.0, 1.0], states="xy")]
    credited = estimate(rollouts, credit="gigpo", baseline="dr_grpo").calls.sort("rollout", "position")
    # R = 1 and 1. x: G = 1, 1, no information; y: G = 0, 1
    assert credited["advantage"].to_list() == [0.0, -0.5, 0.0, 0.5]
    assert credited["drop"].to_list() == ["zero_spread_group", None, "zero_spread_group", None]


def test_per_agent_compares_each_agent_by_its_own_estimator() -> None:
    rollouts = [
        Rollout(1.0, [0.5, None, None], agents="pcc"),
        Rollout(0.0, [None, 1.0, None], agents="pcc"),
        Rollout(0.5, [None], agents="p"),
    ]
    # p: R = 1.5, 0, .5, rloo: 1.5 − .25, 0 − 1, .5 − .75
    # c: r = 0, 1 and 1, 0: to go: 1, 1 and 1, 0; its returns R = 1 and 1, less their mean
    found = advantages(rollouts, credit="per_agent", baseline="grpo", agent_credit="p=rloo,c=return_to_go+none")
    assert found == pytest.approx([1.25, 1.0, 1.0, -1.0, 1.0, 0.0, -0.25])


def test_a_kind_of_calls_has_its_own_estimator_whoever_made_them() -> None:
    rollouts = [
        Rollout(1.0, [None, 0.5, None], agents="pps", kinds=["main", "summary", "sub_agent"]),
        Rollout(0.0, [None, None, None], agents="pss", kinds=["main", "sub_agent", "summary"]),
    ]
    # summaries, of p and of s: R = 1 + .5, 0; rloo: 1.5 − 0, 0 − 1.5
    # p: R = 1, 0, less nothing; s: the same
    found = advantages(rollouts, credit="per_agent", baseline="none", agent_credit="p=none,kind:summary=rloo")
    assert found == pytest.approx([1.0, 1.5, 1.0, 0.0, 0.0, -1.5])
    past = [("agent:kind:summary", 2.0), ("agent:p", 7.0)]
    kept = {"credit": "per_agent", "agent_credit": "kind:summary=rae,*=none", "history": past}
    # b = .05·2 = .1, then .95·.1 + .05·1.5 = .17, then .95·.17 + 0 = .1615
    assert advantages(rollouts, **kept) == pytest.approx([1.0, 1.5 - 0.17, 1.0, 0.0, 0.0, -0.1615])
    with pytest.raises(
        UsageError, match="unknown kind in 'kind:sumary'; kinds are main, sub_agent, summary, title, other"
    ):
        advantages(rollouts, credit="per_agent", agent_credit="kind:sumary=rloo")


def test_role_conditioned_estimation_keeps_a_baseline_for_each_agent() -> None:
    rollouts = [Rollout(None, [1.0, -1.0], agents="xy"), Rollout(None, [1.0, -1.0], agents="xy")]
    # b_x: .05, then .95·.05 + .05 = .0975; y the same with the opposite sign
    found = advantages(rollouts, credit="per_agent", agent_credit="*=rae")
    assert found == pytest.approx([0.95, -0.95, 0.9025, -0.9025])


def test_an_agents_baseline_continues_from_earlier_datasets() -> None:
    past = [("agent:x", 2.0), ("agent:y", 9.0), ("", 7.0)]
    found = advantages([Rollout(1.0, [None], agents="x")], credit="per_agent", agent_credit="*=rae", history=past)
    # b = .05·2 = .1, then .95·.1 + .05·1 = .145
    assert found == pytest.approx([1.0 - 0.145])


def test_over_calls_a_rollout_with_more_calls_weighs_more() -> None:
    rollouts = [Rollout(3.0, [None, None, None]), Rollout(-1.0, [None])]
    assert advantages(rollouts, baseline="dr_grpo") == pytest.approx([2.0, 2.0, 2.0, -2.0])
    # calls: 3, 3, 3, −1: μ = 2
    assert advantages(rollouts, baseline="dr_grpo", group_over="calls") == pytest.approx([1.0, 1.0, 1.0, -3.0])
    # σ² = (1 + 1 + 1 + 9)/3 = 4
    expected = [1 / (2 + EPS)] * 3 + [-3 / (2 + EPS)]
    assert advantages(rollouts, baseline="grpo", group_over="calls") == pytest.approx(expected)


def test_over_turns_the_return_to_go_is_compared_with_that_of_the_same_turn() -> None:
    rollouts = [Rollout(None, [0.5, 0.5, None]), Rollout(None, [None, 0.5, None]), Rollout(0.0, [None, None])]
    over_turns = {"credit": "return_to_go", "group_over": "turns"}
    # returns by turn: 1, .5, 0; then .5, .5, 0; then 0, 0: nothing is left to be earned
    found = estimate(rollouts, baseline="dr_grpo", **over_turns).calls
    assert found["advantage"].to_list() == pytest.approx([0.5, 1 / 6, 0.0, 0.0, 1 / 6, 0.0, -0.5, -1 / 3])
    assert found["drop"].to_list() == [None, None, "zero_spread_group", None, None, "zero_spread_group", None, None]
    # compared with the mean return of whole rollouts, .5, the second call of the first rollout would look bad
    assert advantages(rollouts, baseline="dr_grpo", credit="return_to_go")[1] == pytest.approx(0.0)
    # .5 is above the mean of the second turn's returns to go before, and below that of the rollouts
    past = [("turn return_to_go gamma 1.0:1", 0.25), ("turn:1", 5.0), ("", 2.0)]
    assert advantages([Rollout(None, [0.5, 0.5])], baseline="running", history=past, **over_turns)[1] == pytest.approx(
        0.25
    )


def test_step_and_running_compare_calls_of_one_turn_with_those_of_the_rollouts_before() -> None:
    # turn 0: 1, 0 (after 1), 2 (after 1 and 0: .5); turn 1: .25, .75 (after .25), .5 (after both: .5)
    rollouts = [Rollout(None, [1.0, 0.25]), Rollout(None, [0.0, 0.75]), Rollout(None, [2.0, 0.5])]
    credited = estimate(rollouts, credit="step", baseline="running").calls.sort("rollout", "position")
    assert credited["advantage"].to_list() == pytest.approx([0.0, 0.0, -1.0, 0.5, 1.5, 0.0])
    assert credited["drop"].to_list() == ["singleton_group"] * 2 + [None] * 4


def test_step_and_running_never_compare_a_call_with_what_whole_rollouts_earned() -> None:
    # earlier rollouts earned 4 with four calls of 1 each; a call of 1.5 is better than theirs, not worse than 4
    past = [("", 4.0), ("step turn:0", 1.0), ("step turn:1", 1.0), ("", 4.0), ("step turn:0", 1.0)]
    found = advantages([Rollout(None, [1.5, 0.5])], credit="step", baseline="running", history=past)
    assert found == pytest.approx([0.5, -0.5])


def test_calls_of_one_agent_in_one_rollout_count_once_and_not_for_each_other() -> None:
    rollouts = [Rollout(None, [1.0, 3.0]), Rollout(None, [5.0, 0.0, 1.0]), Rollout(None, [4.0])]
    credited = estimate(rollouts, credit="step", step_by="agent", baseline="running")
    # before the second: (1 + 3)/2 = 2; before the third: (2 + (5 + 0 + 1)/3)/2 = 2
    found = credited.calls.sort("rollout", "position")["advantage"].to_list()
    assert found == pytest.approx([0.0, 0.0, 3.0, -2.0, -1.0, 2.0])
    # the history for later datasets
    assert credited.parts.sort("rollout").rows() == [
        (0, "step agent:a", 2.0),
        (1, "step agent:a", 2.0),
        (2, "step agent:a", 4.0),
    ]


def test_step_and_rae_keep_a_baseline_for_each_turn_that_a_rollout_moves_once() -> None:
    rollouts = [Rollout(None, [1.0, 4.0]), Rollout(None, [0.0, 4.0])]
    # turn 0: b = .05, then .95·.05 + 0 = .0475; turn 1: b = .2, then .95·.2 + .2 = .39
    found = advantages(rollouts, credit="step", baseline="rae")
    assert found == pytest.approx([0.95, 3.8, -0.0475, 3.61])
    # one agent: means 2.5 and 2; b = .125, then .95·.125 + .1 = .21875
    found = advantages(rollouts, credit="step", step_by="agent", baseline="rae")
    assert found == pytest.approx([0.875, 3.875, -0.21875, 3.78125])


def test_step_in_a_mixed_team_continues_from_each_agents_own_calls() -> None:
    # names are user input: a brace is not a placeholder
    past = [("agent:{ step turn:0", 1.0), ("agent:y step turn:0", 3.0), ("agent:{", 9.0), ("step turn:0", 7.0)]
    rollouts = [Rollout(None, [2.0, 2.0], agents="{y")]
    found = advantages(rollouts, credit="per_agent", agent_credit="*=step+running", history=past)
    assert found == pytest.approx([1.0, -1.0])


def test_step_and_global_compare_calls_of_one_turn_over_all_groups() -> None:
    # turn 0: 0 and 2, μ = 1, σ = √2; turn 1: 10 and 16, μ = 13, σ = √18
    rollouts = [Rollout(None, [0.0, 10.0]), Rollout(None, [2.0, 16.0], group=1)]
    found = advantages(rollouts, credit="step", baseline="global")
    assert found == pytest.approx([-1 / math.sqrt(2), -3 / math.sqrt(18), 1 / math.sqrt(2), 3 / math.sqrt(18)])


def test_step_and_batch_scale_by_the_calls_of_one_turn() -> None:
    rollouts = [Rollout(None, [0.0, 10.0]), Rollout(None, [2.0, 16.0]), Rollout(None, [4.0, 10.0], group=1)]
    # group 0: turn 0 μ = 1, turn 1 μ = 13; all: turn 0 has 0, 2, 4, σ = 2; turn 1 has 10, 16, 10, σ = √12
    found = advantages(rollouts, credit="step", baseline="batch")
    assert found == pytest.approx([-0.5, -3 / math.sqrt(12), 0.5, 3 / math.sqrt(12), 0.0, 0.0])


def test_leave_one_out_leaves_out_all_calls_of_the_rollout() -> None:
    rollouts = [Rollout(3.0, [None, None, None]), Rollout(-1.0, [None]), Rollout(0.0, [None])]
    # the first rollout's calls: others are −1 and 0; the second: (3 + 3 + 3 + 0)/4; the third: (9 − 1)/4
    found = advantages(rollouts, baseline="rloo", group_over="calls")
    assert found == pytest.approx([3.5, 3.5, 3.5, -1 - 9 / 4, -2.0])


def test_calls_of_one_rollout_alone_are_no_comparison() -> None:
    alone = [Rollout(None, [1.0, 3.0]), Rollout(None, [1.0, 3.0], group=1)]
    for settings in ({"credit": "step", "step_by": "agent"}, {"credit": "return_to_go", "group_over": "calls"}):
        credited = estimate(alone, baseline="dr_grpo", **settings).calls
        assert credited["drop"].to_list() == ["singleton_group"] * 4
        assert credited["advantage"].to_list() == [0.0] * 4


@pytest.mark.parametrize("baseline", ["running", "rae", "global", "none"])
def test_gigpo_is_refused_with_a_baseline_that_knows_no_states(baseline: str) -> None:
    with pytest.raises(UsageError, match=f"'gigpo' compares calls from the same state, but baseline '{baseline}'"):
        advantages([Rollout(1.0, [None])], credit="gigpo", baseline=baseline)
    with pytest.raises(UsageError, match="compares calls from the same state, but baseline"):
        advantages([Rollout(1.0, [None])], credit="per_agent", agent_credit=f"a=gigpo+{baseline}")


@pytest.mark.parametrize("baseline", ["running", "rae"])
def test_pooled_calls_are_refused_with_a_baseline_of_rollouts(baseline: str) -> None:
    with pytest.raises(UsageError, match=f"pools the calls of a group, but baseline '{baseline}'"):
        advantages([Rollout(1.0, [None])], group_over="calls", baseline=baseline)


@pytest.mark.parametrize(
    "settings", [{"gamma": math.nan}, {"gamma": 1.1}, {"episode_weight": math.inf}, {"state_weight": math.nan}]
)
def test_numbers_that_would_make_advantages_no_numbers_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"gamma = |_weight = "):
        make_plan(DatasetSettings(**settings), has_tasks=True)  # type: ignore[arg-type]


def test_what_compares_within_groups_has_a_baseline_of_groups_also_without_tasks() -> None:
    def default(**settings: str) -> str:
        return make_plan(DatasetSettings(**settings), has_tasks=False).estimator.baseline  # type: ignore[arg-type]

    assert (default(), default(credit="step")) == ("running", "running")
    assert [default(credit="gigpo"), default(group_over="calls"), default(group_over="turns")] == ["grpo"] * 3


def test_batch_and_global_scale_by_all_rollouts() -> None:
    # R = 0, 2 | 4, 6: σ = √(20/3)
    rollouts = [*_whole(0.0, 2.0), *_whole(4.0, 6.0, group=1)]
    scale = math.sqrt(20 / 3)
    assert advantages(rollouts, baseline="batch") == pytest.approx([-1 / scale, 1 / scale] * 2)
    assert advantages(rollouts, baseline="global") == pytest.approx([v / scale for v in (-3, -1, 1, 3)])


def test_several_rewards_are_weighted_and_added_up_first() -> None:
    rollouts = [
        Rollout(1.0, [None], more={"style": (0.5, [None])}),
        Rollout(0.0, [None], more={"style": (None, [2.0])}),
    ]
    # 1 + .2·.5 = 1.1 and 0 + .2·2 = .4: μ = .75
    found = advantages(rollouts, baseline="dr_grpo", reward_name="reward=1,style=0.2")
    assert found == pytest.approx([0.35, -0.35])


def test_gdpo_normalizes_each_reward_then_the_sum_over_the_batch() -> None:
    rollouts = [
        Rollout(1.0, [None], more={"style": (10.0, [None])}),
        Rollout(0.0, [None], more={"style": (20.0, [None])}),
        Rollout(0.0, [None], more={"style": (30.0, [None])}),
    ]
    # reward: μ = 1/3, σ = √(1/3); style: μ = 20, σ = 10
    spread = math.sqrt(1 / 3)
    correct = [v / (spread + EPS) for v in (2 / 3, -1 / 3, -1 / 3)]
    style = [v / (10 + EPS) for v in (-10.0, 0.0, 10.0)]
    sums = [a + 0.5 * b for a, b in zip(correct, style, strict=True)]
    sigma = math.sqrt(sum(v * v for v in sums) / 2)
    found = advantages(rollouts, reward_name="reward,style=0.5", combine="gdpo")
    assert found == pytest.approx([v / (sigma + EPS) for v in sums])


def test_gdpo_scales_rollouts_by_their_own_spread_whatever_branches_are_beside_them() -> None:
    settings = {"reward_name": "reward,style=0.5", "combine": "gdpo", "baseline": "dr_grpo"}
    alone = [Rollout(reward, [None], group=0, more={"style": (0.0, [None])}) for reward in (1.0, 0.0, 0.0)]
    branches = [
        Rollout(10.0 * number, [None], group=1, is_branch=True, more={"style": (0.0, [None])}) for number in range(4)
    ]
    found = advantages(alone, **settings)
    together = advantages([*alone, *branches], **settings)
    assert together[:3] == pytest.approx(found)
    assert together[4] - together[3] == pytest.approx(10 * (found[0] - found[1]))  # in the same units
    assert advantages(branches, **settings)[3] == pytest.approx(15 / (math.sqrt(500 / 3) + EPS))


def test_gdpo_tells_apart_what_the_sum_would_not() -> None:
    """Two rewards with opposite winners: their sums are equal, so that summing first leaves nothing to learn from."""
    rollouts = [
        Rollout(1.0, [None], more={"style": (0.0, [None])}),
        Rollout(0.0, [None], more={"style": (1.0, [None])}),
        Rollout(0.0, [None], group=1, more={"style": (0.0, [None])}),
        Rollout(1.0, [None], group=1, more={"style": (0.0, [None])}),
    ]
    names = "reward,style=0.5"
    assert advantages(rollouts[:2], reward_name="reward,style") == [0.0, 0.0]
    found = advantages(rollouts, reward_name=names, combine="gdpo")
    assert found[0] == pytest.approx(-found[1])
    assert 0.0 < found[0] < found[3]


def test_a_reward_that_a_rollout_may_lack_is_compared_among_those_that_have_it() -> None:
    rollouts = [
        Rollout(0.0, [None], more={"style": (1.0, [None])}),
        Rollout(0.0, [None], more={"style": (3.0, [None])}),
        Rollout(1.0, [None], more={"style": (None, [None])}),
    ]
    terms = estimate(rollouts, reward_name="reward,style?", combine="gdpo", baseline="dr_grpo").terms
    style = terms.filter(pl.col("reward_name") == "style").select("rollout", "value", "center").rows()
    assert style == [(0, 1.0, 2.0), (1, 3.0, 2.0)]


@pytest.mark.parametrize(
    ("settings", "term"),
    [({"group_over": "turns"}, "turn"), ({"group_over": "calls"}, "call"), ({"credit": "gigpo"}, "state")],
)
def test_a_reward_that_a_rollout_lacks_is_no_zero_among_turns_calls_and_states(
    settings: dict[str, str], term: str
) -> None:
    rollouts = [
        Rollout(0.0, [None], more={"style": (1.0, [None])}),
        Rollout(0.0, [None], more={"style": (0.5, [None])}),
        Rollout(1.0, [None], more={"style": (None, [None])}),
    ]
    terms = estimate(rollouts, reward_name="reward,style?", combine="gdpo", baseline="dr_grpo", **settings).terms
    style = terms.filter(pl.col("reward_name") == "style", pl.col("term") == term)
    assert style.select("rollout", "value", "center").rows() == [(0, 1.0, 0.75), (1, 0.5, 0.75)]


@pytest.mark.parametrize(
    "settings",
    [
        {"credit": "gigpo"},
        {"credit": "return_to_go", "baseline": "rloo"},
        {"credit": "per_agent", "agent_credit": "a=rloo,*=return_to_go+rae"},
        {"reward_name": "reward,style=0.5", "combine": "gdpo", "baseline": "running"},
    ],
)
def test_an_advantage_is_the_sum_of_its_terms(settings: dict[str, str]) -> None:
    rollouts = [
        Rollout(1.0, [0.5, None], agents="ab", states="xy", more={"style": (0.5, [None, 1.0])}),
        Rollout(0.25, [None, 2.0], agents="ab", states="xx", more={"style": (2.0, [None, None])}),
        Rollout(0.5, [None], agents="b", states="y", group=1, more={"style": (1.0, [None])}),
        Rollout(2.5, [1.0], agents="b", states="y", group=1, more={"style": (0.0, [None])}),
    ]
    credited = estimate(rollouts, **settings)
    total = pl.col("weight") * (pl.col("value") - pl.col("center")) * pl.col("scale")
    summed = credited.terms.group_by("rollout", "position").agg(total.sum().alias("sum"))
    both = credited.calls.join(summed, on=["rollout", "position"])
    assert both.height == credited.calls.height == 6
    assert both["sum"].to_list() == pytest.approx(both["advantage"].to_list())
    assert any(both["advantage"].abs() > 0.1)
