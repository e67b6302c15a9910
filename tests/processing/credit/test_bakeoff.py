"""The bake-off's frames are those of the dataset step: the chain's rollouts, sent as spans, get the same advantages."""

import numpy as np
import polars as pl
import pytest

from evaluation.bakeoff.chain import Chain, Played, frames
from evaluation.bakeoff.chain_branches import measured
from evaluation.bakeoff.chain_runs import policy_of
from evaluation.bakeoff.estimators import ESTIMATORS, Vine, advantages_of
from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import measured_with
from trainspan_schemas.telemetry import keys

CHAIN = Chain(calls=4, goals=(1, 2))
GROUP = 4
_TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "step"}


def stored(bench: Bench, played: Played, values: np.ndarray) -> None:
    """Sends the rollouts as an agent and the policy server would."""
    for number, task in enumerate(played.task):
        rollout = bench.rollout(f"r{number:03d}", task=f"t{task}")
        for call, action in enumerate(played.actions[number]):
            at, agent = 10.0 * call, ("planner", "worker")[call % 2]
            client = rollout.span(f"client{call}", at + 1, at + 2, **{"gen_ai.operation.name": "chat"})
            prompt = [int(task), call, int(played.places[number, call])]
            span = rollout.call(call, prompt, [int(action)], at=at + 1.1, parent=client, agent=agent)
            rollout.span(f"tool{call}", at + 3, at + 4, **_TOOL)
            rollout.spans[-1].failed = bool(played.failed[number, call])
            if np.isfinite(values[number, call]):
                name = {keys.EVALUATION_NAME: keys.STATE_VALUE, **measured_with("policy 0")}
                rollout.log_reward(float(values[number, call]), span_id=span, at=200.0 + call, **name)
        bench.send(rollout.reward(played.rewards[number]))


@pytest.mark.ci
def test_a_dataset_of_stored_spans_has_the_advantages_that_are_compared(bench: Bench) -> None:
    rng = np.random.default_rng(7)
    policy = policy_of(CHAIN, 0.5)
    group = np.repeat(np.arange(2), GROUP)
    played = CHAIN.play(policy, group, rng, np.zeros(8, int), np.zeros(8, int))
    values, _ = measured(CHAIN, policy, played, Vine(2), rng)
    assert 0 < played.rewards.mean() < 1
    stored(bench, played, values)
    for name, estimate in ESTIMATORS.items():
        known = values if estimate.vine else np.full(values.shape, np.nan)
        found = advantages_of(estimate, *frames(played, group, known)).sort("rollout", "position")
        out = bench.out / name.replace(" ", "-")
        made = rows(bench.build(round_=0, out=out, min_coverage=0.0, **estimate.settings))
        kept = found.filter(~pl.col("dropped"))
        assert made.height == kept.height, name
        ids = [f"{bench.run_id}-r{number:03d}" for number in kept["rollout"]]
        assert made.sort("rollout_id", "call_index")["rollout_id"].to_list() == ids, name
        advantages = made.sort("rollout_id", "call_index")["advantage"].to_list()
        assert advantages == pytest.approx(kept["advantage"].to_list(), abs=1e-6), name
