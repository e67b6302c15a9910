"""A rollout that is too large to be derived for a page: some of its calls as the store holds them, without rewards and credit."""

from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.explain.account import CallAccount, CreditAccount, RolloutAccount
from trainspan_processing.explain.describe import greatest_ids
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.tokens import read_tokens
from trainspan_processing.tables import SPAN_KEY
from trainspan_processing.text.token_text import find_decoder
from trainspan_processing.traces.server_calls import CALL_COLUMNS, join_calls, narrow_calls
from trainspan_viewer.queries.paths import NotFoundError
from trainspan_viewer.queries.requests.explain_request import ExplainRequest
from trainspan_viewer.queries.requests.limits import NotDerivedError
from trainspan_viewer.queries.requests.parts import part_of
from trainspan_viewer.queries.store import Row

__all__ = ["NOT_DERIVED", "NOT_IN_DATASET", "LargePart", "large_part"]

NOT_DERIVED: Final = "credit not derived here"
NOT_IN_DATASET: Final = "not in the dataset"
_MOST_TOKENS: Final = 1_000_000
"""Tokens of the calls on one page; a single call may have more."""
_FACTS: Final = [
    "rollout_id",
    "attempt",
    "run_id",
    "round",
    "task_id",
    "split",
    "status",
    "reward",
    "start_ns",
    "end_ns",
]


@dataclass(frozen=True, slots=True)
class LargePart:
    """Calls from number `start` of `n_calls`, in the order of their start."""

    account: RolloutAccount
    """With only these calls. A call's `index` and `turn` are its number; reasons are NOT_DERIVED or NOT_IN_DATASET."""
    start: int
    n_calls: int
    why: str
    """Why nothing is derived."""


def large_part(request: ExplainRequest, error: NotDerivedError, *, start: int, most: int) -> LargePart:
    """At most `most` calls, fewer if they have many tokens. Raises NotFoundError if the store does not hold the rollout."""
    rollout_id = error.rollout_id or request.question.rollout
    selection = Selection(rollout_ids=[rollout_id])
    with Source(request.question.stores, allow_behind=True) as source:
        facts = _facts(source, selection, request.question.attempt)
        columns = list(dict.fromkeys(CALL_COLUMNS))
        rows, n_calls = part_of(source, "calls", selection, columns, start=start, most=most, attempt=facts["attempt"])
        tokens = pl.DataFrame()
        if rows.height:
            fits = (rows["n_tokens"].fill_null(0).cum_sum() <= _MOST_TOKENS).to_list()
            rows = rows.head(max(sum(fits), 1))
            order = rows.select(*SPAN_KEY)
            calls = order.join(join_calls([narrow_calls(rows)]), on=SPAN_KEY, how="inner", maintain_order="left")
            tokens = calls.join(read_tokens(source, calls), on=SPAN_KEY, how="left", maintain_order="left")
    decoder = find_decoder(request.question.models, covering=list(greatest_ids(tokens))) if tokens.height else None
    if facts["start_ns"] is None:
        facts["start_ns"] = int(tokens["start_ns"][0]) if tokens.height else 0
    calls_shown = _calls(request, rollout_id, tokens, start, facts["start_ns"])
    account = RolloutAccount(
        **{name: facts[name] for name in ("rollout_id", "attempt", "run_id", "round", "task_id", "split", "status")},
        reason=None,
        start_ns=facts["start_ns"],
        seconds=None if facts["end_ns"] is None else (facts["end_ns"] - facts["start_ns"]) / 1e9,
        calls=calls_shown,
        foreign=[],
        tools=[],
        edges=[],
        credit=CreditAccount(
            facts["reward"], None, [], [], max((abs(call.advantage or 0.0) for call in calls_shown), default=0.0)
        ),
        decoded_with=decoder.model if decoder else None,
    )
    return LargePart(account, start, n_calls, str(error))


def _facts(source: Source, selection: Selection, attempt: int | None) -> Row:
    """_FACTS of the attempt, of the last one if None; without status and reward while it runs."""
    attempts: dict[int, Row] = {}
    for name, columns in (("holdings", ["rollout_id", "attempt", "run_id", "round", "task_id"]), ("rollouts", _FACTS)):
        for batch in source.read(name, selection, columns):
            for row in batch.select(columns).unique(["attempt"]).sort("attempt").tail(1_000).to_dicts():
                if row["rollout_id"] == (selection.rollout_ids or [""])[0]:
                    attempts[row["attempt"] or 0] = {**dict.fromkeys(_FACTS), **row, "attempt": row["attempt"] or 0}
    chosen = max(attempts, default=-1) if attempt is None else attempt
    if chosen not in attempts:
        raise NotFoundError(f"no attempt {attempt} of rollout {(selection.rollout_ids or [''])[0]!r} in the store")
    return attempts[chosen]


def _calls(
    request: ExplainRequest, rollout_id: str, calls: pl.DataFrame, start: int, start_ns: int
) -> list[CallAccount]:
    dataset = request.question.dataset
    credited: dict[tuple[str, str], float] = {}
    if dataset is not None and calls.height:
        columns = [*SPAN_KEY, "advantage"]
        rows = dataset.rows_of([rollout_id], columns, calls["span_id"].to_list())
        credited = {(row[0], row[1]): row[2] for row in rows.select(columns).iter_rows()}
    absent = NOT_DERIVED if dataset is None else NOT_IN_DATASET
    return [
        CallAccount(
            index=start + offset,
            agent=call["agent"],
            turn=start + offset,
            span_id=call["span_id"],
            policy_name=call["policy_name"],
            policy_version=call["policy_version"],
            temperature=call["temperature"],
            finish_reason=call["finish_reason"],
            start_s=(call["start_ns"] - start_ns) / 1e9,
            seconds=None if call["end_ns"] is None else (call["end_ns"] - call["start_ns"]) / 1e9,
            prompt_ids=call["prompt_ids"] or [],
            completion_ids=call["completion_ids"] or [],
            logprobs=call["logprobs"] or [],
            reason=None if (call["trace_id"], call["span_id"]) in credited else absent,
            advantage=credited.get((call["trace_id"], call["span_id"])),
            kind=call["call_kind"] or "main",
            kind_rule=call["call_kind_rule"] or "",
        )
        for offset, call in enumerate(calls.iter_rows(named=True))
    ]
