"""Checks a store's newest rollouts for problems in training: unfinished rollouts, constrained and unmerged calls.

Rewards, groups and earlier datasets are ignored: the check covers only the captured data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from trainspan_processing.assembly.rows import with_lineage
from trainspan_processing.dataset.ledger import NOTHING_USED
from trainspan_processing.merging.divergence import EXPLANATIONS
from trainspan_processing.merging.unmerged import Unmerged, find_unmerged, first_of_each
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.span_words import read_words
from trainspan_processing.read.tokens import read_tokens
from trainspan_processing.reasons.advice import advice_on
from trainspan_processing.reasons.drop_reasons import call_reason
from trainspan_processing.reasons.missing_calls import find_lacks
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.text.safe_text import visible
from trainspan_processing.text.token_text import Decoder
from trainspan_processing.traces.trace_index import Clock, TraceIndex, index_traces

__all__ = ["NEWEST", "Trouble", "check_rollouts"]

NEWEST: Final = 100
"""Number of rollouts that are checked."""

_MOST_TOKENS: Final = 4_194_304
_EXCERPT: Final = 8
_NEWEST_QUERY: Final = f"""
    SELECT rollout_id, max(seq) AS last FROM calls WHERE rollout_id IS NOT NULL
    GROUP BY rollout_id ORDER BY last DESC LIMIT {NEWEST}"""
_FORK: Final = "fork"


@dataclass(frozen=True, slots=True)
class Trouble:
    """One finding: its subject (`unfinished`, `constrained`, `unmerged`), one example in words, and what to do."""

    subject: str
    detail: str
    advice: str


def check_rollouts(source: Source, decoder: Decoder | None, clock: Clock, settle_s: float) -> list[Trouble]:
    """The problems of the NEWEST rollouts with calls in the stores of `source`."""
    newest = pl.concat([pl.DataFrame(schema={"rollout_id": pl.String}), *_newest(source)])["rollout_id"].to_list()
    if not newest:
        return []
    selection = Selection(rollout_ids=sorted(set(newest)))
    traces = index_traces(source, selection, NOTHING_USED, now_ns=clock.now_ns(), settle_s=settle_s)
    troubles = [*_unfinished(source, traces), *_constrained(source, traces), *_unmerged(source, traces, decoder)]
    return [Trouble(trouble.subject, visible(" ".join(trouble.detail.split())), trouble.advice) for trouble in troubles]


def _newest(source: Source) -> Iterator[pl.DataFrame]:
    for batch in source.query(_NEWEST_QUERY):
        yield batch.select("rollout_id")


def _unfinished(source: Source, traces: TraceIndex) -> Iterator[Trouble]:
    incomplete = traces.rollouts.filter(~pl.col("complete") & ~pl.col("superseded"))
    settled = incomplete.filter(~pl.col("pending"))
    if incomplete.is_empty():
        return
    example = (settled if settled.height else incomplete).sort("end_ns").row(-1, named=True)
    lacks = find_lacks(source, traces, example["rollout_id"], example["attempt"])
    coming = (
        f", {incomplete.height - settled.height} of them may still be arriving"
        if settled.height < incomplete.height
        else ""
    )
    problems = "; ".join(lack.what for lack in lacks)
    yield Trouble(
        "unfinished",
        f"{incomplete.height} of the {traces.rollouts.height} newest rollouts{coming}, e.g. {example['rollout_id']}: {problems}",
        "; ".join(dict.fromkeys(lack.advice for lack in lacks)),
    )


def _constrained(source: Source, traces: TraceIndex) -> Iterator[Trouble]:
    """One finding per kind of constraint."""
    calls = traces.calls.with_columns(pl.lit(None, dtype=pl.String).alias("rollout_reason"))
    judged = calls.with_columns(call_reason().alias("reason")).filter(pl.col("reason").str.starts_with("constrained"))
    for (reason,), part in judged.partition_by("reason", as_dict=True, maintain_order=True).items():
        many = f"{part.height} of {traces.calls.height} calls"
        detail = f"{many} ({reason}), e.g. {_call(source, part.row(-1, named=True))}"
        yield Trouble("constrained", detail, advice_on(str(reason)) or "")


def _unmerged(source: Source, traces: TraceIndex, decoder: Decoder | None) -> Iterator[Trouble]:
    """One finding per cause, except forks, which are not a fault."""
    calls = traces.calls.filter(pl.col("rollout_id").is_not_null() & ~pl.col("internal").fill_null(value=False))
    sizes = calls.group_by(ROLLOUT_KEY, maintain_order=True).agg(pl.col("n_tokens").sum(), pl.col("start_ns").max())
    # The newest first, as many as easily fit into memory.
    fitting = sizes.sort("start_ns", descending=True).filter(pl.col("n_tokens").cum_sum() <= _MOST_TOKENS)
    calls = calls.join(fitting, on=ROLLOUT_KEY, how="semi", maintain_order="left")
    if calls.is_empty():
        return
    payload = read_tokens(source, calls, answers=traces.answers)
    whole = calls.join(payload, on=SPAN_KEY, how="inner", maintain_order="left").filter(
        (pl.col("prompt_ids").list.len() > 0) & (pl.col("completion_ids").list.len() > 0)
    )
    rollout = pl.struct(ROLLOUT_KEY).rank("dense").cast(pl.UInt32).alias("rollout")
    rows = with_lineage(whole.with_columns(rollout)) if whole.height else whole
    if rows.is_empty():
        return
    for count, example in first_of_each(find_unmerged(rows, decoder)):
        if example.divergence.cause == _FORK:
            continue
        explanation = EXPLANATIONS[example.divergence.cause]
        row = rows.row(by_predicate=pl.col("span_id") == example.span_id, named=True)
        detail = (
            f"{count} of {rows.height} calls ({example.divergence.cause}: {explanation.what}), e.g. {_call(source, row)}: "
            f"{_difference(example, decoder)}"
        )
        yield Trouble("unmerged", detail, explanation.advice)


def _difference(unmerged: Unmerged, decoder: Decoder | None) -> str:
    """The first differing token and a few more, in words."""
    sides = [ids[:_EXCERPT] for ids in (unmerged.divergence.was, unmerged.divergence.now)]
    known = decoder if decoder is not None and decoder.covers(token for ids in sides for token in ids) else None
    was, now = (
        ("nothing" if not ids else repr(known.text(ids)) if known else f"ids {' '.join(map(str, ids))}")
        for ids in sides
    )
    return f"at token {unmerged.divergence.at} call {unmerged.after} has {was}, and its prompt has {now}"


def _call(source: Source, call: Mapping[str, Any]) -> str:
    key = (call["trace_id"], call["span_id"])
    words = read_words(source, [key]).get(key)
    who = ", ".join(
        filter(None, [f"agent {call['agent']}" if call["agent"] else "", f"client {words.client}" if words else ""])
    )
    return f"call {call['call_index']} of rollout {call['rollout_id']}" + (f" ({who})" if who else "")
