"""Explains one rollout, or the rollouts of its group, with the dataset step's own functions."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import polars as pl

from trainspan_processing.assembly.rows import ROW_ORDER, RowCounts, rows_of
from trainspan_processing.branches.states import request_position
from trainspan_processing.branches.stored_branches import read_branches
from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.describe import describe_rollout, greatest_ids
from trainspan_processing.explain.evidence import Evidence, Key, SpanText
from trainspan_processing.explain.inquiry import Inquiry, Question, inquire
from trainspan_processing.read.measurements import read_measurements
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.tokens import read_tokens
from trainspan_processing.read.tool_uses import read_tool_uses
from trainspan_processing.reasons.missing_calls import find_lacks
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.text.token_text import Decoder, find_decoder
from trainspan_processing.traces.message_records import read_records, with_records
from trainspan_processing.traces.trace_index import Clock
from trainspan_schemas.errors import DatasetError

__all__ = ["GroupAccount", "compare_credit", "explain_group", "explain_rollout"]

RolloutKey = tuple[str, int]
"""(rollout_id, attempt)."""

_SPAN_TEXT: Final = [
    *ROLLOUT_KEY,
    *SPAN_KEY,
    "name",
    "start_ns",
    "end_ns",
    "status_code",
    "status_message",
    "attributes",
]
_COMPARED: Final = [*SPAN_KEY, "advantage"]


@dataclass(frozen=True, slots=True)
class GroupAccount:
    """The rollouts that are compared with each other, and those of the same task that are not."""

    rollouts: list[RolloutAccount]
    """Sorted by (rollout_id, attempt); only those asked for."""
    keys: list[RolloutKey]
    """All of them."""


def _any_size(_: Iterable[str]) -> None:
    """Checks nothing."""


def explain_rollout(question: Question, clock: Clock, *, pieces: bool = True) -> RolloutAccount:
    """Everything about one rollout; its credit is as `trainspan dataset` computes it over the rollouts of its round.

    What branches measured about it is as the store is now, also if a dataset is asked for. With `pieces`, the text of each token
    is part of the account. Raises UsageError if the id matches no rollout or several,
    StoreError if a store cannot be read.
    """
    with inquire(question, clock) as inquiry:
        rollout = inquiry.rollout
        [evidence] = _gather(inquiry, [(rollout.rollout_id, rollout.attempt)])
        evidence = _with_branches(evidence, inquiry.source.live())
    return describe_rollout(evidence, _decoder([evidence], question), pieces=pieces)


def explain_group(
    question: Question,
    clock: Clock,
    *,
    start: int = 0,
    most: int | None = None,
    check: Callable[[Iterable[str]], None] = _any_size,
) -> GroupAccount:
    """The rollouts of the same run, round and task as the one in question, or with the same first prompt if it has no task.

    The accounts are those of explain_rollout without pieces and branches, for at most `most` of them from number `start`. `check` gets the
    ids of these rollouts before their contents are read, and may raise. Otherwise raises the same errors.
    """
    with inquire(question, clock) as inquiry:
        keys = _siblings(inquiry)
        part = _part(keys, start, most)
        check(rollout_id for rollout_id, _ in part)
        gathered = _gather(inquiry, part)
    return _described(gathered, keys, question)


def compare_credit(
    question: Question,
    changes: Mapping[str, Any],
    clock: Clock,
    *,
    start: int = 0,
    most: int | None = None,
    check: Callable[[Iterable[str]], None] = _any_size,
) -> tuple[GroupAccount, GroupAccount]:
    """The group as explain_group gives it, and the same with `changes` of settings. Raises the same errors."""
    with inquire(question, clock) as inquiry:
        keys = _siblings(inquiry)
        part = _part(keys, start, most)
        check(rollout_id for rollout_id, _ in part)
        content = _read(inquiry, part)
        before = _gather(inquiry, part, content)
        other = inquiry.changed(changes)
        after = None if other is None else _gather(other, part, content)
    explanation = _described(before, keys, question)
    if after is not None:
        return explanation, _described(after, keys, question)
    return explanation, explain_group(replace(question, changes=changes), clock, start=start, most=most, check=check)


def _part(keys: Sequence[RolloutKey], start: int, most: int | None) -> Sequence[RolloutKey]:
    return keys[start : None if most is None else start + most]


def _described(gathered: Sequence[Evidence], keys: list[RolloutKey], question: Question) -> GroupAccount:
    decoder = _decoder(gathered, question)
    return GroupAccount([describe_rollout(evidence, decoder, pieces=False) for evidence in gathered], keys)


def _decoder(gathered: Sequence[Evidence], question: Question) -> Decoder | None:
    ids = [token for evidence in gathered for token in greatest_ids(evidence.calls)]
    return find_decoder(question.models, covering=ids) if ids else None


def _siblings(inquiry: Inquiry) -> list[RolloutKey]:
    """The rollouts of its task, compared or not; without a task, those that it is compared with."""
    rollout, decided = inquiry.rollout, inquiry.decided
    key = (rollout.rollout_id, rollout.attempt)
    is_rollout = (pl.col("rollout_id") == key[0]) & (pl.col("attempt") == key[1])
    rollouts = decided.rewarded.rollouts
    if rollout.task_id is not None:
        task = ["run_id", "round", "task_id"]
        same = rollouts.join(rollouts.filter(is_rollout).select(task), on=task, how="semi", nulls_equal=True)
    else:
        compared = decided.compared
        same = compared.join(compared.filter(is_rollout).select("group_id"), on="group_id", how="semi")
    return sorted({key, *((row[0], row[1]) for row in same.select(*ROLLOUT_KEY).iter_rows())})


@dataclass(frozen=True, slots=True)
class _Content:
    """What the stores hold of some rollouts, whatever their credit."""

    payload: pl.DataFrame
    """TOKENS of their calls."""
    texts: Mapping[RolloutKey, Mapping[Key, SpanText]]
    tools: pl.DataFrame
    """TOOL_USES of them."""
    explanations: Mapping[str, Mapping[tuple[str | None, float | None, str | None, int], str]]
    """Rollout id → the reasons of its evaluations (see Evidence)."""


def _read(inquiry: Inquiry, keys: Sequence[RolloutKey]) -> _Content:
    ids = sorted({rollout_id for rollout_id, _ in keys})
    calls = inquiry.decided.calls.filter(pl.col("rollout_id").is_in(ids))
    payload = read_tokens(inquiry.source, calls, answers=inquiry.traces.answers)
    texts = _texts(inquiry.source, ids)
    attributes = {key: text.attributes for spans in texts.values() for key, text in spans.items()}
    tools = read_tool_uses(inquiry.source, calls, inquiry.traces.spans, attributes)
    return _Content(payload, texts, tools, _explanations(inquiry.source, ids))


def _gather(inquiry: Inquiry, keys: Sequence[RolloutKey], content: _Content | None = None) -> list[Evidence]:
    """The evidence of each of these rollouts; what they share is read and computed once."""
    content = content or _read(inquiry, keys)
    decided = inquiry.decided
    ids = [rollout_id for rollout_id, _ in keys]
    some = pl.col("rollout_id").is_in(ids)
    calls = _with_tokens(decided.calls.filter(some), content.payload)
    worth = decided.compared.select("rollout", pl.col("reward").alias("rollout_reward"))
    sound = calls.filter(pl.col("reason").is_null()).join(worth, on="rollout", how="left")
    rows: pl.DataFrame | None = None
    if sound.height:
        rows, outcome = rows_of(sound.sort(*ROW_ORDER, "position", nulls_last=False), decided.limits, RowCounts())
        calls = _with_outcome(calls, outcome)
    gathered = [_evidence(inquiry, key, calls, rows, content) for key in keys]
    dataset = inquiry.dataset
    if dataset is None:
        return gathered
    written = dataset.rows_of(ids, [*ROLLOUT_KEY, *_COMPARED])
    unlike = _unlike(inquiry)
    return [replace(each, dataset=dataset, agrees=_agrees(written, each), unlike=unlike) for each in gathered]


def _evidence(
    inquiry: Inquiry, key: RolloutKey, calls: pl.DataFrame, rows: pl.DataFrame | None, content: _Content
) -> Evidence:
    rollout_id, attempt = key
    is_rollout = (pl.col("rollout_id") == rollout_id) & (pl.col("attempt") == attempt)
    rollout = inquiry.decided.rewarded.rollouts.filter(is_rollout)
    if rollout.is_empty():
        raise DatasetError(f"rollout {rollout_id} is in the store, but none of its spans is: wait for them to arrive")
    own_rows = None if rows is None else rows.filter(is_rollout)
    return Evidence(
        rollout=rollout.row(0, named=True),
        calls=_numbered(calls.filter(is_rollout)),
        rows=None if own_rows is None or own_rows.is_empty() else own_rows,
        decided=inquiry.decided,
        traces=inquiry.traces,
        texts=content.texts.get(key, {}),
        tools=content.tools.filter(is_rollout),
        explanations=content.explanations.get(rollout_id, {}),
        settings=inquiry.settings,
        lacks=find_lacks(inquiry.source, inquiry.traces, rollout_id, attempt),
    )


def _with_branches(evidence: Evidence, source: Source) -> Evidence:
    rollout = evidence.rollout
    measured = read_measurements(source, evidence.calls["trace_id"].unique().to_list())
    return replace(
        evidence, measured=measured, branches=read_branches(source, rollout["rollout_id"], rollout["attempt"])
    )


def _numbered(calls: pl.DataFrame) -> pl.DataFrame:
    """One rollout's calls, each with the position of its `request` and a number of its own.

    Several choices of one request have the same call index.
    """
    calls = calls.with_columns(request_position().alias("request"))
    shared = calls["call_index"].is_duplicated().any()
    return calls.with_columns(pl.col("position").cast(pl.Int32).alias("call_index")) if shared else calls


def _with_tokens(calls: pl.DataFrame, payload: pl.DataFrame) -> pl.DataFrame:
    return calls.join(payload, on=SPAN_KEY, how="left", maintain_order="left")


def _with_outcome(calls: pl.DataFrame, outcome: pl.DataFrame) -> pl.DataFrame:
    """The calls with their final reasons."""
    reasons = outcome.select(*SPAN_KEY, pl.col("reason").alias("token_reason"))
    calls = calls.join(reasons, on=SPAN_KEY, how="left", maintain_order="left")
    return calls.with_columns(pl.coalesce("reason", "token_reason").alias("reason")).drop("token_reason")


def _texts(source: Source, rollout_ids: list[str]) -> dict[RolloutKey, dict[Key, SpanText]]:
    """Rollout → the content of its spans, by span."""
    rows = [
        row
        for batch in source.read("spans", Selection(rollout_ids=rollout_ids), _SPAN_TEXT)
        for row in batch.select(_SPAN_TEXT).iter_rows(named=True)
    ]
    records = read_records(source, {row["trace_id"] for row in rows})
    texts: dict[RolloutKey, dict[Key, SpanText]] = {}
    for row in rows:
        key = (row["trace_id"], row["span_id"])
        attributes = with_records(json.loads(row["attributes"] or "{}"), records, key)
        failed = row["status_code"] == 2
        text = SpanText(
            row["name"] or "", row["start_ns"], row["end_ns"], failed, row["status_message"] or None, attributes
        )
        texts.setdefault((row["rollout_id"], row["attempt"] or 0), {})[key] = text
    return texts


def _explanations(
    source: Source, rollout_ids: list[str]
) -> dict[str, dict[tuple[str | None, float | None, str | None, int], str]]:
    explanations: dict[str, dict[tuple[str | None, float | None, str | None, int], str]] = {}
    columns = ["rollout_id", "name", "score", "source", "time_ns", "explanation"]
    for batch in source.read("evaluations", Selection(rollout_ids=rollout_ids), columns):
        for rollout_id, *which, explanation in batch.drop_nulls("explanation").select(columns).iter_rows():
            explanations.setdefault(rollout_id, {})[which[0], which[1], which[2], which[3]] = explanation
    return explanations


def _agrees(written: pl.DataFrame, evidence: Evidence) -> bool:
    """Whether a dataset's rows equal the rows computed now, with exactly the same advantages."""
    stored = evidence.own(written).select(_COMPARED).sort(SPAN_KEY)
    if evidence.rows is None:
        return stored.is_empty()
    return stored.equals(evidence.rows.select(_COMPARED).sort(SPAN_KEY))


def _unlike(inquiry: Inquiry) -> int:
    """Number of rollouts compared by the dataset that are missing in the stores or have a different reward there.

    Only rollouts of the same task count if no others were read.
    """
    assert inquiry.dataset is not None
    then = inquiry.dataset.seen().drop_nulls("reward")
    if inquiry.is_narrow:
        rollout = inquiry.rollout
        task = {"run_id": rollout.run_id, "round": rollout.round, "task_id": rollout.task_id}
        then = then.filter(pl.col(name).eq_missing(pl.lit(value)) for name, value in task.items())
    now = inquiry.decided.rewarded.rollouts.filter(pl.col("reason").is_null()).select(*ROLLOUT_KEY, "reward")
    return then.select(*ROLLOUT_KEY, "reward").join(now, on=[*ROLLOUT_KEY, "reward"], how="anti").height
