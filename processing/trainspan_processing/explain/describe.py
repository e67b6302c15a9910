"""Turns evidence into an account: names the rules, places the calls in their segments, decodes the tokens."""

from collections.abc import Iterator
from typing import Final

import polars as pl

from trainspan_processing.branches.stored_branches import StoredBranch
from trainspan_processing.credit.group_advice import group_advice
from trainspan_processing.explain.account import (
    BranchAccount,
    CallAccount,
    CreditAccount,
    ForeignAccount,
    GroupMember,
    RolloutAccount,
    ToolAccount,
    UntrainedAccount,
)
from trainspan_processing.explain.arithmetic import CreditedCall, Term, credit_lines, reward_line
from trainspan_processing.explain.evidence import Evidence, Key, seconds
from trainspan_processing.explain.offered_tools import left_out_tools
from trainspan_processing.explain.reward_edges import describe_edges, reward_parts
from trainspan_processing.merging.unmerged import find_unmerged
from trainspan_processing.reasons.advice import advice_on
from trainspan_processing.reasons.missing_calls import Lack
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.text.dialects import messages_of
from trainspan_processing.text.token_text import Decoder
from trainspan_schemas.artifacts.branches import BranchOrigin
from trainspan_schemas.telemetry import keys

__all__ = ["describe_rollout", "greatest_ids"]

_PLACE: Final = ("segment_id", "segment_pos", "prefix_len")
_EXCERPT: Final = 12
"""Tokens shown of each side at the point where two calls diverge."""


def describe_rollout(evidence: Evidence, decoder: Decoder | None, *, pieces: bool = True) -> RolloutAccount:
    """The account of the rollout; `decoder` is used if its vocabulary covers all of the rollout's ids.

    Without `pieces`, the text of single tokens is left out, which takes the most time.
    """
    rollout = evidence.rollout
    start_ns = rollout["start_ns"] or 0
    if decoder is not None and not decoder.covers(greatest_ids(evidence.calls)):
        decoder = None
    return RolloutAccount(
        **{name: rollout[name] for name in (*ROLLOUT_KEY, "run_id", "round", "task_id", "split", "status", "reason")},
        start_ns=start_ns,
        seconds=seconds(start_ns, rollout["end_ns"]),
        calls=_calls(evidence, start_ns, decoder, pieces=pieces),
        foreign=_foreign(evidence, start_ns),
        tools=_tools(evidence, start_ns),
        edges=describe_edges(evidence, start_ns),
        credit=_credit(evidence),
        decoded_with=decoder.model if decoder else None,
        dataset=str(evidence.dataset.path) if evidence.dataset else None,
        agrees=evidence.agrees,
        unlike=evidence.unlike,
        lacks=[*evidence.lacks, *_left_out_tools(evidence, decoder)],
        untrained=_untrained(evidence),
        answer=_answer(evidence),
        error=_error(evidence),
        branch=_branch(evidence),
        branches=_branches(evidence),
    )


def _answer(evidence: Evidence) -> str | None:
    span = evidence.texts.get((evidence.rollout["trace_id"], evidence.rollout["span_id"]))
    answer = span.attributes.get(keys.TASK_ANSWER) if span else None
    return answer if isinstance(answer, str) else None


def _error(evidence: Evidence) -> str | None:
    span = evidence.texts.get((evidence.rollout["trace_id"], evidence.rollout["span_id"]))
    return span.error if span and span.failed else None


def _branch(evidence: Evidence) -> BranchAccount | None:
    """Only a runner makes branches: another sender's task id says nothing."""
    rollout = evidence.rollout
    origin = BranchOrigin.of_task(rollout["task_id"] or "") if rollout["by_runner"] else None
    if origin is None:
        return None
    forced = evidence.calls["forced"].fill_null(value=False)
    return BranchAccount(origin, repeated=int(forced.sum()), sampled=int((~forced).sum()))


def _branches(evidence: Evidence) -> list[tuple[int | None, StoredBranch]]:
    first = evidence.calls.unique("request", keep="first", maintain_order=True)
    index = dict(first.select("request", "call_index").iter_rows())
    return [(index.get(branch.call), branch) for branch in evidence.branches]


def _untrained(evidence: Evidence) -> list[UntrainedAccount]:
    """The untrained calls, by reason."""
    special = group_advice(
        evidence.decided.plan.baselines, has_tasks=bool(evidence.decided.compared["task_id"].is_not_null().any())
    )
    accounts: dict[str, UntrainedAccount] = {}
    for row in evidence.calls.filter(pl.col("reason").is_not_null()).iter_rows(named=True):
        reason = row["reason"]
        advice = special.get(reason) or advice_on(reason) or ""
        account = accounts.setdefault(reason, UntrainedAccount(reason, [], [], advice))
        account.calls.append(row["call_index"])
        span = evidence.texts.get((row["trace_id"], row["span_id"]))
        client = span.attributes.get(keys.USER_AGENT) if span else None
        if isinstance(client, str) and client not in account.clients:
            account.clients.append(client)
    return list(accounts.values())


def greatest_ids(calls: pl.DataFrame) -> Iterator[int]:
    """The greatest token id of each prompt and answer."""
    for name in ("prompt_ids", "completion_ids"):
        if name in calls.columns:
            yield from (value for value in calls[name].list.max().drop_nulls())


def _calls(evidence: Evidence, start_ns: int, decoder: Decoder | None, *, pieces: bool) -> list[CallAccount]:
    placed = [] if evidence.rows is None else evidence.rows.select(*SPAN_KEY, *_PLACE).to_dicts()
    rows = {(row["trace_id"], row["span_id"]): row for row in placed}
    index = evidence.call_index
    before = {(row["segment_id"], row["segment_pos"]): index[key] for key, row in rows.items()}
    broken = _broken(evidence.rows, decoder)
    matches = _client_spans(evidence)
    accounts = []
    for call in evidence.calls.iter_rows(named=True):
        key = (call["trace_id"], call["span_id"])
        row = rows.get(key)
        texts = evidence.texts.get(matches.get(key, key)) or evidence.texts.get(key)
        inputs, outputs = messages_of(texts.attributes) if texts else ([], [])
        prompt, completion = call["prompt_ids"] or [], call["completion_ids"] or []
        prefix_len = row["prefix_len"] if row else 0
        accounts.append(
            CallAccount(
                index=call["call_index"],
                agent=call["agent"],
                kind=call["call_kind"],
                kind_rule=call["call_kind_rule"],
                turn=call["turn"],
                span_id=call["span_id"],
                policy_name=call["policy_name"],
                policy_version=call["policy_version"],
                temperature=call["temperature"],
                finish_reason=call["finish_reason"],
                start_s=(call["start_ns"] - start_ns) / 1e9,
                seconds=seconds(call["start_ns"], call["end_ns"]),
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
                broken=broken.get(key),
                messages=inputs,
                answer=outputs[-1] if outputs else None,
                prompt_text=decoder.text(prompt[prefix_len:]) if decoder else None,
                pieces=decoder.pieces(completion) if decoder and pieces else None,
                measured=list(evidence.measured.get(key, ())),
            )
        )
    return accounts


def _left_out_tools(evidence: Evidence, decoder: Decoder | None) -> list[Lack]:
    """What the policy server recorded counts, else what the client did."""
    if decoder is None:
        return []
    matches = _client_spans(evidence)
    prompts = {}
    for call in evidence.calls.iter_rows(named=True):
        key = (call["trace_id"], call["span_id"])
        client, served = evidence.texts.get(matches.get(key, key)), evidence.texts.get(key)
        attributes = {**(client.attributes if client else {}), **(served.attributes if served else {})}
        prompts[call["call_index"]] = (decoder.text(call["prompt_ids"] or []), attributes)
    return left_out_tools(prompts)


def _client_spans(evidence: Evidence) -> dict[Key, Key]:
    """Call → the client's span of it."""
    columns = [*SPAN_KEY, "client_trace_id", "client_span_id"]
    rows = evidence.traces.matches.calls.select(columns).iter_rows()
    return {row[:2]: row[2:] for row in rows if row[3] is not None}


def _broken(rows: pl.DataFrame | None, decoder: Decoder | None) -> dict[Key, str]:
    """For each call that opens a segment, why it does not continue its agent's previous call."""
    reasons: dict[Key, str] = {}
    for unmerged in find_unmerged(rows, decoder) if rows is not None else ():
        divergence = unmerged.divergence
        was, now = (_excerpt(ids[:_EXCERPT], decoder) for ids in (divergence.was, divergence.now))
        reasons[unmerged.trace_id, unmerged.span_id] = (
            f"{divergence.cause}: departs from call {unmerged.after} at token {divergence.at}: {was} became {now}"
        )
    return reasons


def _excerpt(ids: list[int], decoder: Decoder | None) -> str:
    if not ids:
        return "nothing"
    return repr(decoder.text(ids)) if decoder else " ".join(map(str, ids))


def _foreign(evidence: Evidence, start_ns: int) -> list[ForeignAccount]:
    reasons = {(row[0], row[1]): row[2] for row in evidence.decided.others.select(*SPAN_KEY, "reason").iter_rows()}
    accounts = []
    for call in evidence.own(evidence.traces.others).sort("start_ns", "span_id").iter_rows(named=True):
        key = (call["trace_id"], call["span_id"])
        texts = evidence.texts.get(key)
        inputs, outputs = messages_of(texts.attributes) if texts else ([], [])
        accounts.append(
            ForeignAccount(
                model=call["model"],
                agent=call["agent"],
                start_s=(call["start_ns"] - start_ns) / 1e9,
                seconds=seconds(call["start_ns"], call["end_ns"]),
                reason=reasons.get(key, "no_token_ids"),
                messages=inputs,
                answer=outputs[-1] if outputs else None,
            )
        )
    return accounts


def _tools(evidence: Evidence, start_ns: int) -> list[ToolAccount]:
    calls = {(row["trace_id"], row["span_id"]): row for row in evidence.calls.iter_rows(named=True)}
    accounts = []
    for use in evidence.tools.iter_rows(named=True):
        call = calls.get((use["call_trace_id"], use["call_span_id"]), {})
        span = evidence.texts.get((use["trace_id"], use["span_id"]))
        agent = (span.attributes.get("gen_ai.agent.name") if span else None) or call.get("agent")
        began_ns = next(ns for ns in (use["start_ns"], call.get("end_ns"), use["seen_ns"]) if ns is not None)
        accounts.append(
            ToolAccount(
                name=use["name"] or (span.name if span else "tool"),
                agent=agent if isinstance(agent, str) else None,
                start_s=(began_ns - start_ns) / 1e9,
                seconds=None if use["start_ns"] is None else seconds(began_ns, use["end_ns"]),
                call=call.get("call_index"),
                **{name: use[name] for name in ("failed", "arguments", "result", "error")},
            )
        )
    return sorted(accounts, key=lambda tool: tool.start_s)


def _credit(evidence: Evidence) -> CreditAccount:
    decided = evidence.decided
    compared = evidence.own(decided.compared)
    if compared.is_empty():
        why = evidence.rollout["reason"] or "it made no call"
        reward = evidence.rollout["reward"]
        total = [] if reward is None else [reward_line(reward_parts(evidence), reward)]
        return CreditAccount(reward, None, [], [*total, f"not compared with others: {why}"], 0.0)
    group_id, rollout = compared.select("group_id", "rollout").row(0)
    group = decided.compared.filter(pl.col("group_id") == group_id).sort("rollout")
    members = [
        GroupMember(row["rollout_id"], row["attempt"], row["reward"], row["n_calls"], row["rollout"] == rollout)
        for row in group.iter_rows(named=True)
    ]
    advantages = decided.calls.filter(pl.col("group_id") == group_id)["advantage"].abs()
    greatest = advantages.max() if advantages.len() else None
    reward = evidence.rollout["reward"]
    lines = credit_lines(
        decided.plan,
        reward_parts(evidence),
        reward,
        [member.reward for member in members],
        _credited(evidence, rollout),
    )
    return CreditAccount(reward, group_id, members, lines, greatest if isinstance(greatest, float) else 0.0)


def _credited(evidence: Evidence, rollout: int) -> list[CreditedCall]:
    terms: dict[int, list[Term]] = {}
    decided = evidence.decided
    for row in decided.terms.filter(pl.col("rollout") == rollout).iter_rows(named=True):
        label = " ".join(filter(None, (row["reward_name"], row["term"])))
        term = Term(label, row["value"], row["center"], row["scale"], row["weight"], row["drop"])
        terms.setdefault(row["position"], []).append(term)
    valued = decided.plan.with_share(evidence.calls.filter(pl.col("advantage").is_not_null()))
    return [
        CreditedCall(row["call_index"], row["share"], row["advantage"], tuple(terms.get(row["position"], ())))
        for row in valued.iter_rows(named=True)
    ]
