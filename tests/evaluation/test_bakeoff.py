"""The bake-off: exact values worked by hand, simulated rollouts that have them, and scores that tell estimators apart."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from evaluation.__main__ import main
from evaluation.bakeoff import chain_results, report
from evaluation.bakeoff.agent_runs import _stage, scores_of
from evaluation.bakeoff.chain import Chain, frames
from evaluation.bakeoff.chain_branches import measured
from evaluation.bakeoff.chain_results import area, tokens_to
from evaluation.bakeoff.chain_runs import EXACT, STEP_KL, _moved, _softmax, learn, policy_of, score
from evaluation.bakeoff.estimators import ESTIMATORS, Vine, advantages_of
from evaluation.bakeoff.scores import agreement
from evaluation.provenance import provenance

SMALL = Chain(calls=2, goals=(1, 2))


def test_values_of_the_chain_are_those_worked_by_hand() -> None:
    q, v = SMALL.action_values(policy_of(SMALL, 0.0))
    # Goal 1: one of two steps forward; a step back from place 0 stays there. Goal 2: both steps forward.
    assert v[:, 0, 0].tolist() == pytest.approx([1 / 3 + 2 / 3 * 1 / 3, 1 / 9])
    assert q[0, 0, 0].tolist() == pytest.approx([1, 1 / 3, 1 / 3])
    assert q[1, 1, 1].tolist() == [1.0, 0.0, 0.0]
    assert (q[0, 1, 1] == 1.0).all(), "who is at the goal stays there"


def test_simulated_rollouts_have_the_exact_value() -> None:
    chain, rng = Chain(), np.random.default_rng(0)
    policy = policy_of(chain, 0.5)
    task = np.arange(20_000) % len(chain.goals)
    nothing = np.zeros_like(task)
    rewards = chain.play(policy, task, rng, nothing, nothing).rewards
    assert rewards.mean() == pytest.approx(chain.success(policy), abs=4 * rewards.std() / np.sqrt(len(task)))


def test_branches_agree_better_with_the_truth_than_rewards_of_whole_rollouts() -> None:
    chain = Chain()
    found = {name: score(chain, name, 1.0, 3) for name in ("identical", "vine m 4")}
    assert found["vine m 4"].correlation > found["identical"].correlation + 0.1
    assert found["vine m 4"].sign > found["identical"].sign


def test_branching_some_calls_does_not_favor_what_was_sampled() -> None:
    """After the arrival no action matters: its mean estimate is 0, also for rare actions."""
    chain, groups = Chain(), 400
    policy, rng = policy_of(chain, 1.0), np.random.default_rng(1)
    group = np.repeat(np.arange(groups), 8)
    nothing = np.zeros_like(group)
    played = chain.play(policy, group % len(chain.goals), rng, nothing, nothing)
    values, _ = measured(chain, policy, played, Vine(4, "random:.25"), rng)
    _, exact = chain.action_values(policy)
    calls = np.broadcast_to(np.arange(chain.calls), values.shape)
    known = np.where(np.isnan(values), np.nan, exact[played.task[:, None], calls, played.places[:, :-1]])
    found = advantages_of(ESTIMATORS["vine m 4, random:.25"], *frames(played, group, known))
    arrived = found["place"].to_numpy() >= np.array(chain.goals)[found["task"].to_numpy()]
    means = found.filter(pl.Series(arrived)).group_by("action").agg(pl.col("advantage").mean()).sort("action")
    # With the two calls of each rollout whose answers were least likely they are .14, .06 and .06, whatever the number of groups.
    spread = means["advantage"].max() - means["advantage"].min()
    assert spread < 0.04


def test_a_call_of_a_group_without_spread_has_no_estimate() -> None:
    group = np.repeat(np.arange(40), 3)
    nothing = np.zeros_like(group)
    played = SMALL.play(policy_of(SMALL, 0.0), group % 2, np.random.default_rng(0), nothing, nothing)
    calls = advantages_of(ESTIMATORS["identical"], *frames(played, group, np.full(played.actions.shape, np.nan)))
    are_equal = np.ptp(played.rewards.reshape(40, 3), axis=1) == 0
    assert 0 < are_equal.sum() < 40
    assert calls["dropped"].to_list() == are_equal[group[calls["rollout"].to_numpy()]].tolist()


def test_every_estimator_scores_the_same_calls() -> None:
    found = {score(SMALL, name, 0.0, 0).calls for name in ESTIMATORS}
    assert found == {40 * 8 * 2}


def test_policies_learn_from_advantages_at_their_price_in_tokens() -> None:
    chain = Chain()
    plain, exact, vine = (learn(chain, name, 0, 5_000, 2) for name in ("identical", EXACT, "vine m 4"))
    assert plain[0] == exact[0] == (0, chain.success(policy_of(chain, 0.0)))
    # Four groups of eight rollouts of eight calls; with m = 4 also 4 · (7 + … + 1) = 112 tokens of branches per rollout.
    assert plain[1][0] == 256
    assert vine[1][0] == 256 + 32 * 112
    assert plain[-1][1] > 0.6 > plain[0][1]
    assert len(vine) == 3
    assert area(exact, 5_000) > area(plain, 5_000)
    reached = tokens_to(exact, 0.9)
    assert reached is not None
    assert reached < 5_000
    assert tokens_to(exact, 1.1) is None


def test_agreement_counts_signs_and_says_what_is_missing() -> None:
    found = agreement([2.0, -1.0, 0.0, 5.0], [1.0, 1.0, -1.0, 0.0], [False, False, True, False])
    # Right, wrong, half; the last call does not matter.
    assert found.sign == pytest.approx(0.5)
    assert (found.dropped, found.calls) == (0.25, 4)
    assert agreement([0.0, 0.0], [1.0, -1.0], [True, True]).correlation == 0.0
    assert np.isnan(agreement([1.0], [0.0], [False]).sign)


def test_only_calls_whose_state_was_measured_by_branches_are_scored() -> None:
    def call(number: int, advantage: float | None, by: str, interval: tuple[float, float] | None) -> dict[str, object]:
        key = {"trace_id": "t", "span_id": str(number)}
        return {**key, "advantage": advantage, "interval": interval, "value": {"by": by} if by else None}

    truth = [
        {
            "rollout_id": "r",
            "calls": [
                call(0, 0.5, "group", (0.1, 0.9)),
                call(1, 0.5, "branches", (0.1, 0.9)),
                call(2, -0.5, "branches", (-0.9, 0.1)),
                call(3, None, "branches", None),
            ],
        }
    ]
    estimates = {"good": [{"trace_id": "t", "span_id": "1", "advantage": 2.0}]}
    found = scores_of(truth, estimates)
    assert (found["calls"], found["certain"], found["rollouts"]) == (2, 1, 1)
    # Call 1 is right; call 2 has no estimate, which counts half.
    assert found["agreement"]["good"]["sign"]["mean"] == 0.75
    assert found["agreement"]["good"]["certain_sign"]["mean"] == 1.0
    assert found["agreement"]["good"]["dropped"] == 0.5


def test_a_small_bake_off_is_stored_tabulated_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_results, "CHAINS", {"small": SMALL})
    monkeypatch.setattr(chain_results, "BUDGETS", {"small": 300})
    monkeypatch.setattr(chain_results, "ROUNDS", 3)
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    result = chain_results.run_chain(range(2))
    chain = result["chains"]["small"]
    assert chain["agreement"]["untrained"]["identical"]["sign"]["gain"]["mean"] == 0.0
    # 2 calls and 4 branches of 1 call per rollout, 4 groups of 8.
    assert chain["learning"]["vine m 4"]["tokens_of_a_round"] == 6 * 32
    stored = json.loads(report.store("small", "the command", provenance(), result).read_text())
    assert (stored["command"], stored["seeds"]) == ("the command", [0, 1])
    assert len(stored["commit"]) == 40
    lines = report.tables_of_chain(stored).splitlines()
    assert lines[0] == "small chain, 2 calls:"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[4:]] == [*ESTIMATORS, EXACT]
    report.draw_chain(stored, tmp_path / "chain.png")
    assert (tmp_path / "chain.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_stage_is_not_repeated(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(folder=tmp_path)
    made = [_stage(world, "few", lambda: {"number": 1}), _stage(world, "few", lambda: {"number": 2})]
    assert [stage["number"] for stage in made] == [1, 1]


def test_every_round_moves_the_policy_equally_far() -> None:
    chain = Chain()
    logits = np.zeros(chain.shape)
    for scale in (1e-3, 1.0, 1e3):
        calls = pl.DataFrame(
            {"task": [0, 1], "position": [0, 3], "place": [0, 2], "action": [0, 1], "advantage": [scale, -scale]}
        )
        moved = _softmax(_moved(logits, calls))
        old, new = (np.stack([policy[0, 0, 0], policy[1, 3, 2]]) for policy in (policy_of(chain, 0.0), moved))
        assert float((old * np.log(old / new)).sum(-1).mean()) == pytest.approx(STEP_KL, rel=1e-3)
        assert moved[0, 0, 0, 0] > 1 / 3 > moved[1, 3, 2, 1]
    nothing = calls.with_columns(advantage=pl.lit(0.0))
    assert (_moved(logits, nothing) == logits).all()


def test_a_bake_off_of_a_harness_is_refused() -> None:
    with pytest.raises(SystemExit, match="terminal is a harness"):
        main(["bakeoff", "terminal", "--model", "m"])
