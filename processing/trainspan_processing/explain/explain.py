"""Finds one rollout and everything that determines its credit, with the dataset step's own functions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import polars as pl

from trainspan_processing.assembly.recorded import recorded
from trainspan_processing.assembly.rows import ROW_ORDER, RowCounts, make_rows
from trainspan_processing.dataset.ledger import NOTHING_USED
from trainspan_processing.dataset.published import Published
from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.describe import describe_rollout
from trainspan_processing.explain.dry_run import DryRun, dry_run
from trainspan_processing.explain.evidence import Evidence, SpanText
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.tokens import read_tokens
from trainspan_processing.reasons.missing_calls import find_lacks
from trainspan_processing.reasons.reason_counts import NO_ROLLOUT
from trainspan_processing.reasons.waiting import find_groups
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.text.token_text import find_decoder
from trainspan_processing.traces.message_records import read_records, with_records
from trainspan_processing.traces.trace_index import Clock, TraceIndex, index_traces
from trainspan_schemas.errors import DatasetError, UsageError
from trainspan_schemas.settings import DatasetSettings

__all__ = ["Question", "explain_rollout"]

NEWEST: Final = "newest"
_MOST_EXAMPLES: Final = 5
_SPAN_TEXT: Final = [*SPAN_KEY, "name", "start_ns", "end_ns", "status_code", "attributes"]


@dataclass(frozen=True, slots=True)
class Question:
    """The rollout to explain, and how it is credited."""

    stores: Sequence[str]
    """Paths or grpc:// addresses."""
    rollout: str
    """Its id or the beginning of it; `newest`: the rollout that ended last, within `dataset` if given."""
    settings: DatasetSettings
    attempt: int | None = None
    """None: the last attempt."""
    dataset: Published | None = None
    """Explain the credit given by this dataset: with its settings, compared with the rollouts that it saw."""
    models: Sequence[str | None] = ()
    """Models to try for a tokenizer, best guess first."""


@dataclass(frozen=True, slots=True)
class _Found:
    rollout_id: str
    attempt: int
    run_id: str | None
    round: int | None


def explain_rollout(question: Question, clock: Clock) -> RolloutAccount:
    """Everything about one rollout; its credit is as `trainspan dataset` computes it over the rollouts of its round.

    Raises UsageError if the id matches no rollout or several, StoreError if a store cannot be read.
    """
    settings, dataset = _settings(question), question.dataset
    if dataset is not None:
        return _explained_by(dataset, question, settings, clock)
    with Source(question.stores, allow_behind=True) as source:
        found = _find(source, question.rollout, question.attempt)
        company, now_ns = _company(source, found), clock.now_ns()
        traces = index_traces(source, company, NOTHING_USED, now_ns=now_ns, settle_s=settings.settle_s)
        decided = dry_run(source, traces, settings, NOTHING_USED)
        evidence = _evidence(source, traces, decided, found, settings)
    return describe_rollout(evidence, find_decoder(question.models) if evidence.calls.height else None)


def _explained_by(dataset: Published, question: Question, settings: DatasetSettings, clock: Clock) -> RolloutAccount:
    """The account from what the dataset's run saw and computed."""
    view = recorded(dataset, question.stores)
    clock, earlier = view.clock(clock), view.earlier
    wanted, attempt = question.rollout, question.attempt
    if wanted == NEWEST:
        wanted, attempt = _newest_of(dataset)
    with view.open(question.stores, allow_behind=True) as source:
        found = _find(source, wanted, None)
        at_hand = view.rollouts_at_hand(source)
        traces = index_traces(source, at_hand, earlier, now_ns=clock.now_ns(), settle_s=settings.settle_s)
        found = _seen(found, attempt, traces.rollouts, dataset)
        # A round has no later dataset that its groups could wait for.
        wait_s = settings.group_wait_s if view.selection.round is None else 0.0
        groups = find_groups(traces.rollouts, earlier, clock.now_ns(), wait_s)
        decided = dry_run(source, traces, settings, earlier, groups.held)
        evidence = _evidence(source, traces, decided, found, settings)
    judged = replace(
        evidence,
        dataset=dataset,
        agrees=_agrees(dataset, evidence),
        unlike=_unlike(dataset, decided),
    )
    return describe_rollout(judged, find_decoder(question.models) if evidence.calls.height else None)


def _settings(question: Question) -> DatasetSettings:
    """The settings of the question, or of its dataset if it has one."""
    if question.dataset is None:
        return question.settings
    known = {field.name for field in fields(DatasetSettings)}
    said = {key: value for key, value in question.dataset.manifest["settings"].items() if key in known}
    return replace(question.settings, **said)


def _newest_of(dataset: Published) -> tuple[str, int]:
    """The last rollout to end among those with rows in the dataset, else among all that the dataset saw."""
    seen = dataset.seen().filter(~pl.col("rollout_id").str.starts_with(NO_ROLLOUT))
    if seen.is_empty():
        raise UsageError(f"{dataset.path} covers no rollout: name another dataset")
    rollout_id, attempt = seen.sort(pl.col("kept") > 0, "end_ns").select(*ROLLOUT_KEY).row(-1)
    return rollout_id, attempt


def _find(source: Source, wanted: str, attempt: int | None) -> _Found:
    columns = "rollout_id, attempt, run_id, round"
    if wanted == NEWEST:
        sql = f"SELECT {columns} FROM rollouts ORDER BY end_ns DESC NULLS LAST, start_ns DESC LIMIT 1"
    else:
        quoted = wanted.replace("'", "''")
        sql = f"SELECT {columns} FROM rollouts WHERE starts_with(rollout_id, '{quoted}') ORDER BY 1, 2 LIMIT 1000"
    rows = [_Found(*row) for batch in source.query(sql) for row in batch.select(columns.split(", ")).iter_rows()]
    named = [row for row in rows if row.rollout_id == wanted] or rows
    ids = sorted({row.rollout_id for row in named})
    where = " and ".join(source.stores)
    if not ids:
        raise UsageError(f'no rollout {wanted!r} in {where}: see `trainspan sql "SELECT rollout_id FROM rollouts"`')
    if len(ids) > 1:
        shown = ", ".join(ids[:_MOST_EXAMPLES])
        raise UsageError(f"{wanted!r} is a prefix of {len(ids)} rollout ids in {where} ({shown}): use a longer one")
    attempts = sorted({row.attempt or 0 for row in named})
    chosen = attempts[-1] if attempt is None else attempt
    if chosen not in attempts:
        raise UsageError(f"rollout {ids[0]} has no attempt {attempt}: it has {_listed(attempts)}")
    found = next(row for row in named if (row.attempt or 0) == chosen)
    return replace(found, attempt=chosen)


def _seen(found: _Found, attempt: int | None, rollouts: pl.DataFrame, dataset: Published) -> _Found:
    """The given attempt, else the last one that the dataset saw. Raises UsageError if the dataset did not see it."""
    seen = rollouts.filter(pl.col("rollout_id") == found.rollout_id)["attempt"].sort().to_list()
    if not seen:
        raise UsageError(f"{dataset.path} does not cover rollout {found.rollout_id}: name the dataset that does")
    if attempt is not None and attempt not in seen:
        raise UsageError(
            f"{dataset.path} does not cover attempt {attempt} of rollout {found.rollout_id}: it covers {_listed(seen)}"
        )
    return replace(found, attempt=seen[-1] if attempt is None else attempt)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _company(source: Source, found: _Found) -> Selection:
    """The rollouts that it is compared with: all rollouts of its run and round."""
    if found.run_id is not None and found.round is not None:
        return Selection(found.run_id, found.round)
    run = "run_id IS NULL" if found.run_id is None else f"run_id = '{found.run_id.replace(chr(39), chr(39) * 2)}'"
    round_ = "round IS NULL" if found.round is None else f"round = {found.round}"
    sql = f"SELECT DISTINCT rollout_id FROM rollouts WHERE {run} AND {round_} ORDER BY 1"
    ids = {row[0] for batch in source.query(sql) for row in batch.select("rollout_id").iter_rows()}
    return Selection(rollout_ids=sorted({*ids, found.rollout_id}))


def _evidence(
    source: Source, traces: TraceIndex, decided: DryRun, found: _Found, settings: DatasetSettings
) -> Evidence:
    own = (pl.col("rollout_id") == found.rollout_id) & (pl.col("attempt") == found.attempt)
    alone = Selection(rollout_ids=[found.rollout_id])
    rollout = decided.rewarded.rollouts.filter(own)
    if rollout.is_empty():
        raise DatasetError(
            f"rollout {found.rollout_id} is in the store, but none of its spans is: wait for them to arrive"
        )
    calls = decided.calls.filter(own)
    worth = decided.compared.select("rollout", pl.col("reward").alias("rollout_reward"))
    sound = (
        decided.sound.filter(own).join(worth, on="rollout", how="left").sort(*ROW_ORDER, "position", nulls_last=False)
    )
    chunks = [(sound, traces.answers)] if sound.height else []
    made = list(make_rows(source, chunks, decided.limits, RowCounts()))
    payload = read_tokens(source, calls, answers=traces.answers) if calls.height else None
    judged = _with_outcome(calls, [outcome for _, outcome in made])
    return Evidence(
        rollout=rollout.row(0, named=True),
        calls=judged if payload is None else judged.join(payload, on=SPAN_KEY, how="left", maintain_order="left"),
        rows=pl.concat([rows for rows, _ in made]) if made else None,
        decided=decided,
        traces=traces,
        texts=_texts(source, alone),
        settings=settings,
        lacks=find_lacks(source, traces, found.rollout_id, found.attempt),
    )


def _with_outcome(calls: pl.DataFrame, outcomes: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The calls with their final reasons."""
    for outcome in outcomes:
        told = outcome.select(*SPAN_KEY, pl.col("reason").alias("token_reason"))
        calls = calls.join(told, on=SPAN_KEY, how="left", maintain_order="left")
        calls = calls.with_columns(pl.coalesce("reason", "token_reason").alias("reason")).drop("token_reason")
    return calls


def _texts(source: Source, alone: Selection) -> dict[tuple[str, str], SpanText]:
    """The content of the rollout's spans, by span."""
    rows = [
        row
        for batch in source.read("spans", alone, _SPAN_TEXT)
        for row in batch.select(_SPAN_TEXT).iter_rows(named=True)
    ]
    records = read_records(source, {row["trace_id"] for row in rows})
    found = {}
    for row in rows:
        key = (row["trace_id"], row["span_id"])
        attributes = with_records(json.loads(row["attributes"] or "{}"), records, key)
        failed = row["status_code"] == 2
        found[key] = SpanText(row["name"] or "", row["start_ns"], row["end_ns"], failed, attributes)
    return found


def _agrees(dataset: Published, evidence: Evidence) -> bool:
    """Whether the dataset's rows equal the rows computed now, with exactly the same advantages."""
    columns = [*SPAN_KEY, "advantage"]
    written = evidence.own(dataset.rows([*ROLLOUT_KEY, *columns])).select(columns).sort(SPAN_KEY)
    if evidence.rows is None:
        return written.is_empty()
    return written.equals(evidence.rows.select(columns).sort(SPAN_KEY))


def _unlike(dataset: Published, decided: DryRun) -> int:
    """Number of rollouts compared by the dataset that are missing in the stores or have a different reward there."""
    then = dataset.seen().drop_nulls("reward").select(*ROLLOUT_KEY, "reward")
    now = decided.rewarded.rollouts.filter(pl.col("reason").is_null()).select(*ROLLOUT_KEY, "reward")
    return then.join(now, on=[*ROLLOUT_KEY, "reward"], how="anti").height
