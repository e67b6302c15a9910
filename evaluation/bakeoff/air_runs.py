"""How often `trainspan air` finds a rule that is one, and one that is none: on the chain, with values measured by branches."""

from typing import Any, Final

import numpy as np
import polars as pl

from evaluation.bakeoff.chain import Chain, Floats, Played
from evaluation.bakeoff.chain_branches import measured
from evaluation.bakeoff.chain_runs import GROUP, policy_of
from evaluation.bakeoff.estimators import Vine
from trainspan_processing.branches.air_search import search_rules

__all__ = ["run_air"]

SIZES: Final = (128, 256, 512)
"""Branched rollouts."""
NOISE_RULES: Final = 40
"""Rules without meaning, in turn: they mark calls, all calls of a rollout, or the same calls of all rollouts of a task."""
VINE: Final = Vine(4)
TRUE_RULE: Final = "tool_error"
WITHOUT_SIGNAL: Final = "advantages of other rollouts"


def run_air(searches: int) -> dict[str, Any]:
    """Shares of searches that propose the true rule, a false one, and nothing, by number of rollouts and kind of data."""
    found = []
    for rollouts in SIZES:
        for data in ("chain", WITHOUT_SIGNAL):
            ends = [_search(rollouts, data, seed) for seed in range(searches)]
            found.append(
                {
                    "rollouts": rollouts,
                    "data": data,
                    "true": sum(TRUE_RULE in rules for rules in ends) / searches,
                    "false": sum(bool(rules - {TRUE_RULE}) for rules in ends) / searches,
                    "nothing": sum(not rules for rules in ends) / searches,
                }
            )
    return {"searches": searches, "m": VINE.m, "noise_rules": NOISE_RULES, "found": found}


def _search(rollouts: int, data: str, seed: int) -> set[str]:
    """The proposed rules. Without signal, the marks of rules are those of rollouts other than the advantages'."""
    chain, rng = Chain(), np.random.default_rng((seed, rollouts))
    policy = policy_of(chain, 0.5)
    played, advantages = _branched(chain, policy, rollouts, rng)
    failed = played.failed if data == "chain" else _branched(chain, policy, rollouts, rng)[0].failed
    count, length = failed.shape
    number = np.repeat(np.arange(count), length)
    calls = pl.DataFrame(
        {
            "rollout_id": [f"r{each}" for each in number],
            "attempt": np.zeros(len(number), np.int32),
            "trace_id": [f"t{each}" for each in number],
            "span_id": [f"s{each}" for each in range(len(number))],
            "task_id": [f"g{each // GROUP}" for each in number],
            "advantage": advantages.ravel(),
        }
    )
    marks = {TRUE_RULE: failed.ravel()}
    for rule in range(NOISE_RULES):
        share = rng.uniform(0.1, 0.5)
        of_task = rng.random((count // GROUP + 1, length))[number // GROUP, np.tile(np.arange(length), count)]
        own = (rng.random(len(number)), rng.random(count)[number], of_task)[rule % 3]
        marks[f"noise {rule}"] = own < share
    occurrences = [
        calls.filter(pl.Series(mark)).select(pl.lit(rule).alias("rule"), "trace_id", "span_id")
        for rule, mark in marks.items()
    ]
    proposals = search_rules(calls, pl.concat(occurrences), seed=seed).proposals
    return {one.rule for one in proposals} if data == "chain" else {f"{one.rule}, false" for one in proposals}


def _branched(chain: Chain, policy: Floats, rollouts: int, rng: np.random.Generator) -> tuple[Played, Floats]:
    """Rollouts in groups, and the advantages (R, H) that branches measure, as `trainspan branch` computes them."""
    group = np.arange(rollouts) // GROUP
    nothing = np.zeros(rollouts, int)
    played = chain.play(policy, group % len(chain.goals), rng, nothing, nothing)
    values, _ = measured(chain, policy, played, VINE, rng)
    means = np.bincount(group, played.rewards) / np.bincount(group)
    values[:, 0] = means[group]
    return played, np.diff(np.column_stack([values, played.rewards]), axis=1)
