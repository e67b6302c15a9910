"""All reasons for which calls of a dataset are dropped, each with a count, an example and advice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from trainspan_processing.dataset.ledger import NOTHING_USED
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.span_words import read_words
from trainspan_processing.reasons.advice import advice_on
from trainspan_processing.reasons.missing_calls import find_lacks
from trainspan_processing.reasons.reason_counts import NO_ROLLOUT
from trainspan_processing.tables import Schema, compact, empty
from trainspan_processing.text.safe_text import visible
from trainspan_processing.traces.trace_index import index_traces

__all__ = ["EXAMPLES", "Reason", "describe_reasons", "first_examples"]

EXAMPLES: Final[Schema] = {
    "reason": pl.String,
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "trace_id": pl.String,
    "span_id": pl.String,
    "call_index": pl.Int32,
    "agent": pl.String,
}
"""One call for each reason; `span_id` is NULL if only the rollout is known, `rollout_id` if there is no rollout."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason, as it is reported."""

    name: str
    calls: int
    lowers_coverage: bool
    example: str | None
    advice: str

    def __str__(self) -> str:
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        aside = "" if self.lowers_coverage else ", not counted in the coverage"
        example = f"; e.g. {self.example}" if self.example else ""
        return f"{self.name}: {calls}{aside}{example} → {self.advice}"


def first_examples(*frames: pl.DataFrame) -> pl.DataFrame:
    """EXAMPLES: the first call of each `reason` in frames with some of its columns; rows without a reason are skipped."""
    parts = [empty(EXAMPLES)]
    for frame in frames:
        calls = frame.filter(pl.col("reason").is_not_null()).unique("reason", keep="first", maintain_order=True)
        missing = [pl.lit(None, dtype=kind).alias(name) for name, kind in EXAMPLES.items() if name not in calls.columns]
        parts.append(calls.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in EXAMPLES.items()))
    return compact(pl.concat(parts).unique("reason", keep="first", maintain_order=True))


def describe_reasons(
    source: Source,
    dropped: Mapping[str, int],
    expected: frozenset[str],
    examples: pl.DataFrame,
    advice: Mapping[str, str],
    *,
    now_ns: int,
    settle_s: float,
) -> list[Reason]:
    """Every reason of `dropped` (reason → calls), sorted by count, reasons that lower the coverage first.

    `expected` holds the reasons that do not lower it; `advice` by reason replaces the usual advice.
    """
    cases = {case["reason"]: case for case in examples.iter_rows(named=True)}
    words = read_words(source, [(case["trace_id"], case["span_id"]) for case in cases.values() if case["span_id"]])
    sentences = []
    for name, calls in sorted(dropped.items(), key=lambda item: (item[0] in expected, -item[1], item[0])):
        case, todo = cases.get(name), advice.get(name) or advice_on(name) or "see docs/processing.md"
        shown = _example(case, words.get((case["trace_id"], case["span_id"]))) if case else None
        if name == "unfinished" and case and (lacks := _lacks(source, case, now_ns, settle_s)):
            shown = f"{shown}: {'; '.join(lack.what for lack in lacks)}"
            todo = "; ".join(dict.fromkeys([todo, *(lack.advice for lack in lacks)]))
        sentences.append(
            Reason(name, calls, name not in expected, visible(" ".join(shown.split())) if shown else None, todo)
        )
    return sentences


def _example(case: Mapping[str, Any], words: Any) -> str:
    parts = []
    if case["call_index"] is not None and case["rollout_id"]:
        parts.append(f"call {case['call_index']}")
    elif words is not None and words.response:
        parts.append(f"call {words.response}")
    elif case["span_id"]:
        parts.append(f"span {case['span_id']}")
    if (rollout := case["rollout_id"]) and not rollout.startswith(NO_ROLLOUT):
        parts.append(f"{'of ' if parts else ''}rollout {rollout}")
    subject = " ".join(parts)
    who = [f"agent {case['agent']}" if case["agent"] else "", f"client {words.client}" if words else ""]
    return f"{subject} ({', '.join(filter(None, who))})" if any(who) else subject


def _lacks(source: Source, case: Mapping[str, Any], now_ns: int, settle_s: float) -> Sequence[Any]:
    alone = Selection(rollout_ids=[case["rollout_id"]])
    traces = index_traces(source, alone, NOTHING_USED, now_ns=now_ns, settle_s=settle_s)
    return find_lacks(source, traces, case["rollout_id"], case["attempt"] or 0)
