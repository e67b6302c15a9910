"""From evidence to account: names the rules, places the calls in their segments, decodes the tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from trainspan_schemas.settings import DatasetSettings

from ..decoding import Decoder
from ..dialects import messages_of
from ..draft import Draft
from ..frames import ROLLOUT_KEY, SPAN_KEY
from ..published import Published
from ..survey import Survey
from .account import CallAccount, CreditAccount, EdgeAccount, Member, RolloutAccount, ToolAccount
from .arithmetic import CreditedCall, RewardPart, Term, credit_lines
from .tools import tool_step

__all__ = ["RULES", "Evidence", "SpanText", "tell"]

Key = tuple[str, str]

RULES: Final[Mapping[str, str]] = {
    "rollout": "it says so, names only the rollout, or is on the rollout's or a process's own span",
    "response": "it names the response of this call",
    "call": "it is on the call's own span",
    "twin": "it is on the client's span of this call",
    "step": "it is on another span, and this is the latest call under it or under its parent that finished before",
    "fallback": "it is on another span, and no call had finished under it or its parent: so it is the rollout's",
    "air:tool_error": "a tool step failed after this call asked for it",
    "air:parse_error": "what this call wrote could not be parsed",
    "air:repeated_call": "this call asked for a tool with an input that it had asked with before",
}
"""Binding rule → what it says, in words."""


@dataclass(frozen=True, slots=True)
class SpanText:
    """A span with all that it says."""

    name: str
    start_ns: int
    end_ns: int | None
    failed: bool
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of one rollout."""

    rollout: dict[str, Any]
    """Its row of the rollout table with reward and reason."""
    calls: pl.DataFrame
    """Its calls of the draft with final reasons, joined with PAYLOAD."""
    rows: pl.DataFrame | None
    """Its rows, as a dataset has them."""
    draft: Draft
    survey: Survey
    texts: Mapping[Key, SpanText]
    settings: DatasetSettings
    dataset: Published | None
    compared: bool | None


def tell(evidence: Evidence, decoder: Decoder | None) -> RolloutAccount:
    """The account of the rollout; `decoder` is used where its vocabulary covers all of the rollout's ids."""
    rollout = evidence.rollout
    start_ns = rollout["start_ns"] or 0
    if decoder is not None and not decoder.covers(_all_ids(evidence.calls)):
        decoder = None
    return RolloutAccount(
        **{name: rollout[name] for name in (*ROLLOUT_KEY, "run_id", "round", "task_id", "split", "status", "reason")},
        start_ns=start_ns,
        seconds=_seconds(start_ns, rollout["end_ns"]),
        calls=_calls(evidence, start_ns, decoder),
        tools=_tools(evidence, start_ns),
        edges=_edges(evidence, start_ns),
        credit=_credit(evidence),
        decoded_with=decoder.model if decoder else None,
        dataset=str(evidence.dataset.path) if evidence.dataset else None,
        agrees=evidence.compared,
    )


def _all_ids(calls: pl.DataFrame) -> Iterable[int]:
    for name in ("prompt_ids", "completion_ids"):
        if name in calls.columns:
            yield from (value for value in calls[name].list.max().drop_nulls())


def _seconds(start_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else (end_ns - start_ns) / 1e9


def _calls(evidence: Evidence, start_ns: int, decoder: Decoder | None) -> list[CallAccount]:
    rows = {} if evidence.rows is None else {(row["trace_id"], row["span_id"]): row for row in evidence.rows.to_dicts()}
    before = {(row["segment_id"], row["segment_pos"]): row["call_index"] for row in rows.values()}
    twins = {
        row[:2]: row[2:]
        for row in evidence.survey.twins.calls.select(*SPAN_KEY, "twin_trace_id", "twin_span_id").iter_rows()
        if row[3] is not None
    }
    told = []
    for call in evidence.calls.iter_rows(named=True):
        key = (call["trace_id"], call["span_id"])
        row = rows.get(key)
        spoken = evidence.texts.get(twins.get(key, key)) or evidence.texts.get(key)
        inputs, outputs = messages_of(spoken.attributes) if spoken else ([], [])
        prompt, completion = call["prompt_ids"] or [], call["completion_ids"] or []
        prefix_len = row["prefix_len"] if row else 0
        told.append(
            CallAccount(
                index=call["call_index"],
                agent=call["agent"],
                turn=call["turn"],
                span_id=call["span_id"],
                policy_name=call["policy_name"],
                policy_version=call["policy_version"],
                temperature=call["temperature"],
                finish_reason=call["finish_reason"],
                start_s=(call["start_ns"] - start_ns) / 1e9,
                seconds=_seconds(call["start_ns"], call["end_ns"]),
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=call["logprobs"] or [],
                reason=call["reason"],
                step_reward=call["reward"],
                value=call["return"],
                advantage=call["advantage"],
                segment=row["segment_id"] if row else None,
                prefix_len=prefix_len,
                continues=before.get((row["segment_id"], row["segment_pos"] - 1)) if row else None,
                messages=inputs,
                answer=outputs[-1] if outputs else None,
                prompt_text=decoder.text(prompt[prefix_len:]) if decoder else None,
                pieces=decoder.pieces(completion) if decoder else None,
            )
        )
    return told


def _tools(evidence: Evidence, start_ns: int) -> list[ToolAccount]:
    told = []
    for span in sorted(evidence.texts.values(), key=lambda span: span.start_ns):
        if step := tool_step(span.attributes, span.name):
            name, arguments, result = step
            agent = span.attributes.get("gen_ai.agent.name")
            told.append(
                ToolAccount(
                    name=name,
                    agent=agent if isinstance(agent, str) else None,
                    start_s=(span.start_ns - start_ns) / 1e9,
                    seconds=_seconds(span.start_ns, span.end_ns),
                    failed=span.failed,
                    arguments=arguments,
                    result=result,
                )
            )
    return told


def _own(evidence: Evidence, frame: pl.DataFrame) -> pl.DataFrame:
    return frame.filter(
        (pl.col("rollout_id") == evidence.rollout["rollout_id"]) & (pl.col("attempt") == evidence.rollout["attempt"])
    )


def _edges(evidence: Evidence, start_ns: int) -> list[EdgeAccount]:
    """The rewards that count, then what does not, each with its reason."""
    index = {(row[0], row[1]): row[2] for row in evidence.calls.select(*SPAN_KEY, "call_index").iter_rows()}
    same = ["name", "score", "source", "time_ns"]
    stored = evidence.survey.evaluations.filter(pl.col("rollout_id") == evidence.rollout["rollout_id"])
    bound = _own(evidence, evidence.draft.rewarded.edges).sort("time_ns", "name", "score", nulls_last=True)
    recorded = stored.unique(same, keep="first").select(*same, *SPAN_KEY)
    told = []
    for edge in bound.join(recorded, on=same, how="left", nulls_equal=True, maintain_order="left").iter_rows(
        named=True
    ):
        span = evidence.texts.get((edge["trace_id"], edge["span_id"]))
        told.append(
            EdgeAccount(
                name=edge["name"],
                score=edge["score"],
                source=edge["source"],
                at_s=_seconds(start_ns, edge["time_ns"]),
                on=span.name if span else None,
                rule=edge["rule"],
                why=RULES.get(str(edge["rule"]), str(edge["rule"])),
                call=index.get((edge["call_trace_id"], edge["call_span_id"])),
            )
        )
    for row in stored.join(bound, on=same, how="anti", nulls_equal=True).sort("time_ns", "name").iter_rows(named=True):
        span = evidence.texts.get((row["trace_id"], row["span_id"]))
        told.append(
            EdgeAccount(
                name=row["name"],
                score=row["score"],
                source=row["source"],
                at_s=_seconds(start_ns, row["time_ns"]),
                on=span.name if span else None,
                rule=None,
                why=_why_not(evidence, row["name"], row["score"]),
                call=None,
            )
        )
    return told


def _why_not(evidence: Evidence, name: str, score: float | None) -> str:
    if evidence.settings.reward is not None:
        return f"rewards come from {evidence.settings.reward} instead"
    names = [reward.name for reward in evidence.draft.plan.rewards]
    if name not in names:
        return f"the reward is called {' or '.join(names)} (--reward-name)"
    if score is None or score != score:  # noqa: PLR0124 - NaN
        return "it has no score that is a number"
    return "the rollout has a judge, and only the judge's own event counts"


def _credit(evidence: Evidence) -> CreditAccount:
    draft = evidence.draft
    own = _own(evidence, draft.compared)
    if own.is_empty():
        why = evidence.rollout["reason"] or "it made no call"
        return CreditAccount(evidence.rollout["reward"], None, [], [f"not compared with others: {why}"], 0.0)
    group_id, rollout = own.select("group_id", "rollout").row(0)
    group = draft.compared.filter(pl.col("group_id") == group_id).sort("rollout")
    members = [
        Member(row["rollout_id"], row["attempt"], row["reward"], row["n_calls"], row["rollout"] == rollout)
        for row in group.iter_rows(named=True)
    ]
    advantages = draft.calls.filter(pl.col("group_id") == group_id)["advantage"].abs()
    greatest = advantages.max() if advantages.len() else None
    reward = evidence.rollout["reward"]
    lines = credit_lines(
        draft.plan,
        _parts(evidence),
        reward,
        [member.reward for member in members],
        _credited(evidence, rollout),
        evidence.settings.reward,
    )
    return CreditAccount(reward, group_id, members, lines, greatest if isinstance(greatest, float) else 0.0)


def _parts(evidence: Evidence) -> list[RewardPart]:
    weights = {reward.name: reward.weight for reward in evidence.draft.plan.rewards}
    index = {(row[0], row[1]): row[2] for row in evidence.calls.select(*SPAN_KEY, "call_index").iter_rows()}
    return [
        RewardPart(
            row["name"], row["score"], weights[row["name"]], index.get((row["call_trace_id"], row["call_span_id"]))
        )
        for row in _own(evidence, evidence.draft.rewarded.edges).sort("time_ns", "name").iter_rows(named=True)
    ]


def _credited(evidence: Evidence, rollout: int) -> list[CreditedCall]:
    terms: dict[int, list[Term]] = {}
    for row in evidence.draft.terms.filter(pl.col("rollout") == rollout).iter_rows(named=True):
        label = " ".join(filter(None, (row["reward_name"], row["term"])))
        term = Term(label, row["value"], row["center"], row["scale"], row["weight"], row["drop"])
        terms.setdefault(row["position"], []).append(term)
    valued = evidence.calls.filter(pl.col("advantage").is_not_null())
    return [
        CreditedCall(row["call_index"], row["agent"], row["advantage"], tuple(terms.get(row["position"], ())))
        for row in valued.iter_rows(named=True)
    ]
