"""Rows of a dataset: calls with tokens, lineage and credit, chunk by chunk in their final order."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainspan_processing.merging.lineage import trace_lineage
from trainspan_processing.merging.merge_failures import MergeFailures
from trainspan_processing.read.tokens import Tokens
from trainspan_processing.reasons.choices import unused
from trainspan_processing.reasons.drop_reasons import UNTRUSTED, token_reason
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_schemas.artifacts.dataset import COLUMNS
from trainspan_schemas.config.settings import DatasetSettings

__all__ = [
    "ROW_ORDER",
    "CallLimits",
    "RowCounts",
    "add_counts",
    "limits",
    "make_rows",
    "newest_version",
    "rows_of",
    "with_lineage",
]

ROW_ORDER: Final = ["run_id", "round", "task_id", *ROLLOUT_KEY]


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits on calls that are sound without their tokens."""

    newest_version: int | None
    max_staleness: int | None
    max_tokens: int | None
    keep_zero_spread: bool
    choices: str
    """`used` or `all`: which answers to one request are kept."""


@dataclass(slots=True)
class RowCounts:
    """Counts taken while rows are made."""

    rows: int = 0
    segments: int = 0
    first_calls: int = 0
    """Kept (rollout, agent) pairs: each needs at least one segment, however well its calls merge."""
    prompt_tokens: int = 0
    environment_tokens: int = 0
    """Prompt tokens that no earlier call of the segment holds."""
    completion_tokens: int = 0
    versions: list[int] = field(default_factory=list)
    policies: Counter[str] = field(default_factory=Counter)
    """Rows by the name of the policy that made the call."""
    bases: Counter[str] = field(default_factory=Counter)
    """Rows by the digest of the model that the policy's training began with; rows without a digest are not counted."""
    groups: set[str] = field(default_factory=set)
    merge_failures: MergeFailures = field(default_factory=MergeFailures)
    """Calls that do not continue their agent's previous call, by cause."""
    shapes: list[pl.DataFrame] = field(default_factory=list)
    """`prompt_tokens`, `completion_tokens` (u32) and `advantage` of each kept row."""
    calls_per_rollout: list[pl.Series] = field(default_factory=list)
    """Kept calls of each rollout."""


def add_counts(counts: RowCounts, more: RowCounts) -> None:
    """Adds to `counts` those of later rows."""
    for name in ("rows", "segments", "first_calls", "prompt_tokens", "environment_tokens", "completion_tokens"):
        setattr(counts, name, getattr(counts, name) + getattr(more, name))
    counts.versions = sorted({*counts.versions, *more.versions})
    counts.policies.update(more.policies)
    counts.bases.update(more.bases)
    counts.groups |= more.groups
    counts.merge_failures.include(more.merge_failures)
    counts.shapes += more.shapes
    counts.calls_per_rollout += more.calls_per_rollout


def limits(settings: DatasetSettings, newest: int | None) -> CallLimits:
    """The limits that the settings put on calls with tokens; `newest` is the newest policy version of all calls."""
    return CallLimits(newest, settings.max_staleness, settings.max_tokens, settings.keep_zero_spread, settings.choices)


def newest_version(calls: pl.DataFrame, admitted: frozenset[str] = frozenset()) -> int | None:
    """The highest version among `calls` of the selected policies, without those that an agent sent unless they are admitted."""
    counts = ~pl.col("other_policy")
    if UNTRUSTED not in admitted:
        counts &= ~pl.col("untrusted").fill_null(value=False)
    newest = calls.filter(counts)["policy_version"].max()
    return newest if isinstance(newest, int) else None


def make_rows(
    chunks: Iterable[tuple[pl.DataFrame, pl.DataFrame]], limits: CallLimits, counts: RowCounts
) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
    """Yields (rows with COLUMNS, the calls with their final `reason`) for each chunk of calls without a drop reason so far.

    A chunk is (calls, tokens): CALLS of whole rollouts, in the order of rows, with `rollout` (their number), turn, group_id,
    reason, reward, return, advantage and `drop`; and their TOKENS in any order.
    """
    for calls, tokens in chunks:
        # A join of whole rows takes twice as long.
        rows = tokens.select(SPAN_KEY).with_row_index("row")
        places = calls.select(SPAN_KEY).join(rows, on=SPAN_KEY, how="left", maintain_order="left")["row"]
        with_tokens = calls.hstack(tokens.drop(SPAN_KEY).select(pl.all().gather(places)))
        del calls, tokens  # before the next ones are read
        chunk_rows = rows_of(with_tokens, limits, counts)
        del with_tokens
        yield chunk_rows
        del chunk_rows


def rows_of(calls: pl.DataFrame, limits: CallLimits, counts: RowCounts) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(rows, calls with `reason`) of one chunk of calls with their TOKENS. Pure except for updating `counts`."""
    is_unused = unused(calls) if limits.choices == "used" else pl.lit(value=False).alias("unused")
    reason = pl.coalesce(
        "reason",
        token_reason(limits.newest_version, limits.max_staleness, limits.max_tokens),
        pl.when("unused").then(pl.lit("unused_choice")),
        pl.when(~((pl.col("drop") == "zero_spread_group") & limits.keep_zero_spread)).then("drop"),
    )
    judged = calls.with_columns(is_unused).with_columns(reason.alias("reason"))
    is_kept = judged["reason"].is_null()
    rows = with_lineage(judged if is_kept.all() else judged.filter(is_kept))
    _count(rows, counts)
    _count_failures(rows, counts.merge_failures)
    return rows.select(*COLUMNS), judged.drop("prompt_ids", "completion_ids", "logprobs")


def with_lineage(calls: pl.DataFrame) -> pl.DataFrame:
    """Adds segment_id, segment_pos, prefix_len, parent_index, branch and done.

    Computed over kept calls only, so that untrained tokens count as environment.
    """
    kinds = pl.struct("rollout", "policy_name", "temperature")
    strands = calls.select(kinds.rank("dense").cast(pl.Int64)).to_series().to_numpy()
    order = np.argsort(strands, kind="stable")
    back = np.argsort(order)
    strands = strands[order]
    prompts, completions = (Tokens.of(calls[name]).select(order) for name in ("prompt_ids", "completion_ids"))
    segment, position, prefix, parent = trace_lineage(strands, prompts, completions)
    openers = np.flatnonzero(position == 0)  # a strand's segments are numbered in the order in which they open
    first = order[openers[np.searchsorted(openers, _run_starts(strands)) + segment]][back]
    opened = np.cumsum(first == np.arange(len(first)))
    segment_id = opened[first] - opened[_run_starts(calls["rollout"].cast(pl.Int64).to_numpy())]
    parents = pl.Series(np.where(parent >= 0, order[parent], -1)[back], dtype=pl.Int64).replace(-1, None)
    return calls.hstack(
        [
            pl.Series("segment_id", segment_id, dtype=pl.Int32),
            pl.Series("segment_pos", position[back], dtype=pl.Int32),
            pl.Series("prefix_len", prefix[back], dtype=pl.Int32),
            calls["call_index"].gather(parents).alias("parent_index"),
            _branches(calls).alias("branch"),
            calls["next_index"].is_null().alias("done"),
        ]
    )


def _run_starts(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """(C,) the index at which each value's run of equal neighbors begins; values are not negative."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return np.repeat(starts, np.diff(np.append(starts, len(values))))


def _branches(calls: pl.DataFrame) -> pl.Series:
    """For each call, the number of earlier calls of its rollout with exactly the same prompt."""
    alike = pl.len().over("rollout", pl.col("prompt_ids").list.len()) > 1  # a unique length is a unique prompt
    rows = calls.select(alike.arg_true().alias("row"))["row"]
    same = calls[rows].select(pl.int_range(pl.len()).over("rollout", pl.col("prompt_ids").hash()).cast(pl.Int32))
    return pl.zeros(calls.height, dtype=pl.Int32, eager=True).scatter(rows, same.to_series())


def _count_failures(rows: pl.DataFrame, failures: MergeFailures) -> None:
    """Counts the calls that open a segment even though their agent had made a call before."""
    opens, rollout = pl.col("segment_pos") == 0, pl.col("rollout")
    if not rows.select((opens & (rollout == rollout.shift(1))).any()).item():  # no rollout has a second segment
        return
    openers = rows.with_row_index("row").with_columns(
        pl.col("row").cast(pl.Int64).shift(1).over("rollout", "agent").alias("before")
    )
    openers = openers.filter((pl.col("segment_pos") == 0) & pl.col("before").is_not_null())
    if openers.is_empty():
        return
    prompts, completions = Tokens.of(rows["prompt_ids"]), Tokens.of(rows["completion_ids"])
    index = rows["call_index"]
    for row, before, rollout_id, attempt in openers.select("row", "before", *ROLLOUT_KEY).iter_rows():
        where = {"rollout_id": rollout_id, "attempt": attempt, "call_index": index[row], "after": index[before]}
        failures.add((prompts[before], completions[before]), prompts[row], where)


def _count(rows: pl.DataFrame, counts: RowCounts) -> None:
    counts.rows += rows.height
    counts.segments += int((rows["segment_pos"] == 0).sum())
    counts.first_calls += rows.select("rollout", "agent").n_unique() if rows.height else 0
    prompts = int(rows["prompt_ids"].list.len().sum() or 0)
    counts.prompt_tokens += prompts
    counts.environment_tokens += prompts - int(rows["prefix_len"].sum() or 0)
    counts.completion_tokens += int(rows["completion_ids"].list.len().sum() or 0)
    versions = rows["policy_version"].drop_nulls()
    counts.versions = sorted({*counts.versions, *versions.unique().to_list()})
    counts.policies.update(dict(rows["policy_name"].drop_nulls().value_counts().iter_rows()))
    counts.bases.update(dict(rows["base"].drop_nulls().value_counts().iter_rows()))
    counts.groups |= set(rows["group_id"].unique().to_list())
    counts.shapes.append(
        rows.select(
            pl.col("prompt_ids").list.len().alias("prompt_tokens"),
            pl.col("completion_ids").list.len().alias("completion_tokens"),
            "advantage",
        )
    )
    counts.calls_per_rollout.append(rows.group_by("rollout", maintain_order=True).len()["len"])
