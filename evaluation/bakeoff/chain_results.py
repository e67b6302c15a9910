"""The result of the bake-off on the chain: all estimators over seeds, as `results/bakeoff/chain.json`."""

import bisect
import statistics
from collections.abc import Sequence
from typing import Any, Final

from evaluation.bakeoff.chain import Chain
from evaluation.bakeoff.chain_runs import EXACT, GROUPS, POLICIES, STEP_KL, learn, policy_of, score
from evaluation.bakeoff.estimators import ESTIMATORS
from trainspan_schemas.intervals import t_interval

__all__ = ["CHAINS", "run_chain"]

CHAINS: Final = {"short": Chain(), "long": Chain(calls=24, goals=(4, 6, 8, 10))}
ROUNDS: Final = 50
"""Rounds of a learning curve at least."""
BUDGETS: Final = {"short": 12_800, "long": 38_400}
"""Sampled tokens of a learning curve."""
POINTS: Final = 40
GOOD: Final = 0.9
"""A success rate to reach."""

Curve = Sequence[tuple[int, float]]


def run_chain(seeds: range) -> dict[str, Any]:
    """Agreement and learning curves of all estimators, on both chains."""
    chains = {}
    for name, chain in CHAINS.items():
        scored = {
            policy: {each: _scored(chain, each, preference, seeds) for each in ESTIMATORS}
            for policy, preference in POLICIES.items()
        }
        for found in scored.values():
            _compare(found)
        learned = {each: _learned(chain, each, seeds, BUDGETS[name]) for each in (*ESTIMATORS, EXACT)}
        success = {policy: chain.success(policy_of(chain, preference)) for policy, preference in POLICIES.items()}
        chains[name] = {
            "calls": chain.calls,
            "goals": list(chain.goals),
            "success": success,
            "agreement": scored,
            "tokens": _grid(BUDGETS[name]),
            "learning": learned,
        }
    return {"seeds": list(seeds), "step_kl": STEP_KL, "groups": GROUPS, "chains": chains}


def area(curve: Curve, budget: int) -> float:
    """The mean success over the sampled tokens from 0 to `budget`, as a share of 1."""
    found = _at_tokens(curve, _grid(budget))
    return statistics.mean(found)


def tokens_to(curve: Curve, least: float) -> int | None:
    """Sampled tokens before the first policy that succeeds so often; None if there is none."""
    return next((tokens for tokens, success in curve if success >= least), None)


def _scored(chain: Chain, name: str, preference: float, seeds: range) -> dict[str, Any]:
    found = [score(chain, name, preference, seed) for seed in seeds]
    return {
        **{
            kind: _over([getattr(one, kind) for one in found]) | {"seeds": [getattr(one, kind) for one in found]}
            for kind in ("sign", "correlation")
        },
        "dropped": statistics.mean(one.dropped for one in found),
        "calls": sum(one.calls for one in found),
    }


def _compare(found: dict[str, dict[str, Any]]) -> None:
    """Adds the gain over `identical`, seed by seed: all estimators see the same rollouts."""
    for estimate in found.values():
        for kind in ("sign", "correlation"):
            pairs = zip(estimate[kind]["seeds"], found["identical"][kind]["seeds"], strict=True)
            estimate[kind]["gain"] = _over([own - other for own, other in pairs])


def _learned(chain: Chain, name: str, seeds: range, budget: int) -> dict[str, Any]:
    """Learning curves: success at equal numbers of sampled tokens, and after equal numbers of rounds."""
    curves = [learn(chain, name, seed, budget, ROUNDS) for seed in seeds]
    found = [tokens_to(curve, GOOD) for curve in curves]
    reached = [tokens if tokens is None or tokens <= budget else None for tokens in found]
    known = [tokens for tokens in reached if tokens is not None]
    return {
        "tokens_of_a_round": statistics.mean(curve[ROUNDS][0] / ROUNDS for curve in curves),
        "by_rounds": _over([statistics.mean(success for _, success in curve[: ROUNDS + 1]) for curve in curves]),
        "area": _over([area(curve, budget) for curve in curves]),
        "end": _over([_at_tokens(curve, [budget])[0] for curve in curves]),
        "tokens_to_0.9": {"seeds": reached, "mean": statistics.mean(known) if len(known) == len(curves) else None},
        "success": [[round(each, 4) for each in _at_tokens(curve, _grid(budget))] for curve in curves],
        "success_by_rounds": [[round(each, 4) for _, each in curve[: ROUNDS + 1]] for curve in curves],
    }


def _grid(budget: int) -> list[int]:
    return [round(budget * point / POINTS) for point in range(POINTS + 1)]


def _at_tokens(curve: Curve, grid: Sequence[int]) -> list[float]:
    """The success at each number of sampled tokens: that of the policy that was trained with no more."""
    tokens = [at for at, _ in curve]
    return [curve[bisect.bisect_right(tokens, at) - 1][1] for at in grid]


def _over(values: Sequence[float]) -> dict[str, Any]:
    """Mean and Student's 95 % interval over seeds."""
    return {"mean": statistics.mean(values), "interval": t_interval(values)}
