"""Reward edges of one rollout in words: the target and rule of each evaluation, and the evaluations that do not count."""

import math
from collections.abc import Mapping
from typing import Any, Final

import polars as pl

from trainspan_processing.credit.plan import looks_at_calls
from trainspan_processing.explain.account import EdgeAccount
from trainspan_processing.explain.arithmetic import RewardPart
from trainspan_processing.explain.evidence import Evidence, seconds
from trainspan_processing.rewards.function_rewards import FUNCTION_RULE
from trainspan_processing.rewards.labels import LABEL_RULE, is_label
from trainspan_processing.rewards.status_rewards import STATUS_RULE
from trainspan_processing.tables import SPAN_KEY
from trainspan_schemas.telemetry import keys

__all__ = ["RULES", "describe_edges", "reward_parts"]

RULES: Final[Mapping[str, str]] = {
    "rollout": "it targets the rollout explicitly, names only the rollout, or is on the rollout's or a process's own span",
    "response": "it names the response of this call",
    "call": "it is on the call's own span",
    "client_call": "it is on the client's span of this call",
    "step": "it is on another span, and this is the latest call under it or under its parent that came back before",
    "unclear": "which call came back before it is unknown, so the rollout gets it, and credit by calls leaves the rollout out",
    "fallback": "it is on another span, and no call had come back under it or its parent, so the rollout gets it",
    "status": "the rollout failed, and [dataset] status_rewards replaces all other rewards for its status",
    FUNCTION_RULE: "the function of [dataset] reward returned it",
    "label": "a person labeled it, which replaces its other rewards",
    "overlong": "the call reached its length limit, which [dataset] overlong punishes",
    "air:tool_error": "a tool step that this call requested failed",
    "air:parse_error": "the output of this call could not be parsed",
    "air:repeated_call": "this call requested a tool with the same input as an earlier call of the rollout",
}
"""Binding rule → its meaning in words."""
_AS_STORED: Final = (
    pl.when(is_label()).then(pl.lit(None, pl.String)).otherwise("name").alias("_name"),
    pl.when(is_label()).then(pl.lit(None, pl.Float64)).otherwise("score").alias("_score"),
)
"""What an edge and its evaluation have in common: as a reward, a label has another name and score."""


def describe_edges(evidence: Evidence, start_ns: int) -> list[EdgeAccount]:
    """The rewards that count, then the evaluations that do not, each with its reason.

    Measurements by branches are none of either (branches/measurements.py), unless their sender may not state them.
    """
    index = evidence.call_index
    same = ["_name", "_score", "source", "time_ns"]
    this_attempt = pl.col("attempt").fill_null(evidence.rollout["attempt"]) == evidence.rollout["attempt"]
    stored = evidence.traces.evaluations.filter((pl.col("rollout_id") == evidence.rollout["rollout_id"]) & this_attempt)
    stored = stored.with_columns(*_AS_STORED)
    bound = evidence.own(evidence.decided.rewarded.edges).sort("time_ns", "name", "score", nulls_last=True)
    bound = bound.with_columns(*_AS_STORED)
    recorded = stored.sort("untrusted", maintain_order=True).unique(same, keep="first").select(*same, *SPAN_KEY)
    edges = []
    for edge in bound.join(recorded, on=same, how="left", nulls_equal=True, maintain_order="left").iter_rows(
        named=True
    ):
        span = evidence.texts.get((edge["trace_id"], edge["span_id"]))
        edges.append(
            EdgeAccount(
                name=edge["name"],
                score=edge["score"],
                source=edge["source"],
                at_s=seconds(start_ns, edge["time_ns"]),
                on=span.name if span else None,
                rule=edge["rule"],
                why=RULES.get(str(edge["rule"]), str(edge["rule"])),
                call=index.get((edge["call_trace_id"], edge["call_span_id"])),
                explanation=_explanation(evidence, edge),
            )
        )
    for row in stored.join(bound, on=same, how="anti", nulls_equal=True).sort("time_ns", "name").iter_rows(named=True):
        span = evidence.texts.get((row["trace_id"], row["span_id"]))
        is_untrusted = bool(row["untrusted"])
        if row["name"] in keys.MEASUREMENTS and not is_untrusted:
            continue
        edges.append(
            EdgeAccount(
                name=row["name"],
                score=row["score"],
                source=row["source"],
                at_s=seconds(start_ns, row["time_ns"]),
                on=span.name if span else None,
                rule=None,
                why=_why_not(evidence, row, untrusted=is_untrusted),
                call=None,
                explanation=_explanation(evidence, row),
            )
        )
    return edges


def _explanation(evidence: Evidence, row: Mapping[str, Any]) -> str | None:
    which = (row["name"], row["score"], row["source"], row["time_ns"])
    if row["source"] == keys.LABEL:  # of which at most one is given at a time
        some = (text for known, text in evidence.explanations.items() if known[2:] == which[2:])
        return next(some, None)
    return evidence.explanations.get(which)


def _why_not(evidence: Evidence, row: Mapping[str, Any], *, untrusted: bool) -> str:
    name, score = row["name"], row["score"]
    if name in keys.MEASUREMENTS:
        return "it is called a measurement by branches, but its sender is neither a runner nor the user"
    if row["source"] == keys.LABEL:
        return _why_no_label(evidence, row, untrusted=untrusted)
    rules = evidence.own(evidence.decided.rewarded.edges)
    if _has_label(evidence):
        return "a person labeled the rollout, which replaces all other rewards"
    if evidence.settings.reward is not None:
        return f"rewards come from {evidence.settings.reward} instead"
    names = [reward.name for reward in evidence.decided.plan.rewards]
    if name not in names:
        return f"the reward is called {' or '.join(names)} (--reward-name)"
    if score is None or not math.isfinite(score):
        return "it has no numeric score"
    if untrusted:
        return "its sender may not reward this rollout: it is neither a runner nor a process that the user started"
    if (rules["rule"] == STATUS_RULE).any():
        return "[dataset] status_rewards replaces all other rewards for the rollout's status"
    return "the rollout has a judge, and only the judge's own event counts"


def _has_label(evidence: Evidence) -> bool:
    """Whether the rollout itself is labeled."""
    edges = evidence.own(evidence.decided.rewarded.edges)
    return edges.filter(pl.col("call_span_id").is_null() & (pl.col("rule") == LABEL_RULE)).height > 0


def _why_no_label(evidence: Evidence, row: Mapping[str, Any], *, untrusted: bool) -> str:
    if untrusted:
        return "its sender may give no labels: only the runner's token may"
    if row["name"] not in (keys.LABEL, keys.PREFERENCE):
        return f"its source is that of a label, whose name would be {keys.LABEL} or {keys.PREFERENCE}"
    if row["name"] == keys.PREFERENCE:
        return "it compares two rollouts, which is no reward: trainspan export dpo makes a pair of it"
    if row["attempt"] is None:
        return "it names no attempt of the rollout"
    if row["score"] is None:
        return "it takes an earlier label back"
    if row["span_id"] is not None and not looks_at_calls(evidence.settings):
        return f"it is on a call, and credit {evidence.settings.credit} adds up the rewards of a rollout"
    if row["span_id"] is not None and _has_label(evidence):
        return "it is on a call, and the rollout's label replaces all its other rewards"
    return "a later label replaces it, or takes it back"


def reward_parts(evidence: Evidence) -> list[RewardPart]:
    """The rewards that add up to R."""
    weights = {reward.name: reward.weight for reward in evidence.decided.plan.rewards}
    index = evidence.call_index
    return [
        RewardPart(
            row["name"], row["score"], weights[row["name"]], index.get((row["call_trace_id"], row["call_span_id"]))
        )
        for row in evidence.own(evidence.decided.rewarded.edges).sort("time_ns", "name").iter_rows(named=True)
    ]
