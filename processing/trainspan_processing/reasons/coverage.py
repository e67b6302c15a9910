"""Accounts for every call, and fails loudly if too few are trainable."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import polars as pl

from trainspan_processing.dataset.ledger import LEDGER, DatasetLedger
from trainspan_processing.reasons.advice import NO_ROLLOUT_NAMED
from trainspan_processing.reasons.drop_reasons import GROUP_REASONS
from trainspan_processing.reasons.reason_counts import NO_ROLLOUT
from trainspan_processing.reasons.reason_examples import Reason
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import DatasetError, NothingToTrainError

__all__ = [
    "EXPECTED",
    "Coverage",
    "check_outcome",
    "check_policies",
    "late_calls",
    "late_evaluations",
    "ledger_lines",
    "lines_to_write",
    "measure_coverage",
    "with_more_evaluations",
]

EXPECTED: Final = frozenset(
    {
        *(
            "internal",
            "forced",
            "no_rollout",
            "not_selected",
            "other_policy",
            "title",
            "validation",
            "late_after_consumed",
            "superseded_by_retry",
            "overlong",
            "unused_choice",
        ),
        *GROUP_REASONS,
    }
)
"""Reasons that the user chose, or that are no fault of the agent or the setup, and so do not lower the coverage."""

_NO_CALL: Final = (
    "set OPENAI_BASE_URL of the agent to the policy server (`trainspan serve`); conversations with a vendor's model are for "
    "`trainspan sft`, and recorded if trainspan[messages] is installed in the agent's environment"
)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts of all calls that were looked at, by outcome."""

    kept: int
    dropped: Mapping[str, int]
    """Reason → number of calls."""
    dropped_without_tokens: Mapping[str, int]
    """Of these, the calls without tokens: nothing says which policy answered, so that datasets of all policies count them."""
    rollouts_kept: int
    rollouts_seen: int
    dropped_rollouts: Mapping[str, int]
    """Reason → number of rollouts without a row."""
    rollouts_without_calls: int
    """Rollouts with status ok and a reward, but nothing to train."""
    pending_calls: int
    """Calls of rollouts that may still be arriving and are dropped for reasons that would lower the coverage."""
    pending_rollouts: int

    @property
    def seen(self) -> int:
        return self.kept + sum(self.dropped.values())

    @property
    def coverage(self) -> float | None:
        """Kept share of the calls that could be expected to be trainable; None without such calls."""
        lost = sum(count for reason, count in self.dropped.items() if reason not in EXPECTED) - self.pending_calls
        return self.kept / (self.kept + lost) if self.kept + lost else None

    @property
    def is_without_contrast(self) -> bool:
        """Whether sound calls were found and were left out only because rewards did not differ."""
        return set(self.dropped) <= EXPECTED and any(reason in self.dropped for reason in GROUP_REASONS)

    @property
    def figures(self) -> dict[str, object]:
        """The figures that the manifest would have had."""
        dropped = dict(sorted(self.dropped.items(), key=lambda item: (-item[1], item[0])))
        return {
            "rollouts_seen": self.rollouts_seen,
            "calls_seen": self.seen,
            "calls_trainable": self.kept,
            "coverage": self.coverage,
            "dropped": dropped,
            "dropped_without_tokens": dict(sorted(self.dropped_without_tokens.items())),
        }


def ledger_lines(
    reason_counts: pl.DataFrame,
    others: pl.DataFrame,
    rollouts: pl.DataFrame,
    parts: pl.DataFrame,
    ledger: DatasetLedger,
    *,
    recount: bool,
) -> pl.DataFrame:
    """One line per rollout seen (LEDGER and `pending`) from the REASON_COUNTS of the calls with tokens, and of `others`.

    `parts` have rollout_id, attempt, part and value.
    Unless `recount`, rollouts that an earlier dataset already dropped and counted, and that are dropped again without a new
    call, are left out.
    """
    is_kept = pl.col("reason").is_null()
    unowned = others.filter(pl.col("rollout_id").str.starts_with(NO_ROLLOUT))
    per_rollout = (
        pl.concat([reason_counts, unowned])
        .group_by(ROLLOUT_KEY, maintain_order=True)
        .agg(
            pl.col("calls").sum(),
            pl.col("calls").filter(is_kept).sum().alias("kept"),
            pl.col("reason").filter(~is_kept).sort_by(pl.col("first").filter(~is_kept)).first().alias("call_reason"),
        )
    )
    known = ("run_id", "round", "task_id", "judge", "reward", "end_ns", "pending", "reason")
    facts = rollouts.select(*ROLLOUT_KEY, *known, "labeled", "function_rewards")
    lines = facts.join(per_rollout, on=ROLLOUT_KEY, how="full", coalesce=True).with_columns(
        pl.col("calls", "kept").fill_null(0), pl.col("pending").fill_null(False)
    )
    lines = lines.with_columns(
        pl.when(pl.col("kept") == 0).then(pl.coalesce("reason", "call_reason")).alias("reason"),
        # Only compared rewards are history for a running mean, also if all calls of a rollout were then dropped.
        pl.when(pl.col("reason").is_null()).then("reward").alias("reward"),
    ).drop("call_reason")
    lines = lines.join(_parts_as_json(parts), on=ROLLOUT_KEY, how="left")
    drops = _drops_as_json(pl.concat([reason_counts, others]))
    lines = lines.join(drops, on=ROLLOUT_KEY, how="left", maintain_order="left")
    if recount:
        return lines
    before = ledger.dropped.select(*ROLLOUT_KEY, pl.col("calls").alias("calls_before"))
    old_news = (pl.col("kept") == 0) & (pl.col("calls") <= pl.col("calls_before"))
    return lines.join(before, on=ROLLOUT_KEY, how="left").filter(~old_news.fill_null(False)).drop("calls_before")


def _drops_as_json(reason_counts: pl.DataFrame) -> pl.DataFrame:
    """rollout_id, attempt, `dropped`. A reason may be a status or a constraint that an agent chose, so it is escaped."""
    counts = reason_counts.drop_nulls("reason").group_by(*ROLLOUT_KEY, "reason").agg(pl.col("calls").sum())
    texts = {reason: json.dumps(reason) for reason in counts["reason"].unique()}
    key = pl.col("reason").replace_strict(texts, return_dtype=pl.String)
    entry = pl.format("{}: {}", key, "calls")
    listed = counts.sort(*ROLLOUT_KEY, "reason").group_by(ROLLOUT_KEY, maintain_order=True).agg(entry.alias("entries"))
    return listed.select(*ROLLOUT_KEY, _braced(pl.col("entries").list.join(", ")).alias("dropped"))


def _braced(entries: pl.Expr) -> pl.Expr:
    """A JSON object of these entries."""
    return pl.concat_str(pl.lit("{"), entries, pl.lit("}"))


def _parts_as_json(parts: pl.DataFrame) -> pl.DataFrame:
    """rollout_id, attempt, `parts`, not including the whole rollout."""
    by_rollout: dict[tuple[str, int], dict[str, float]] = {}
    for rollout_id, attempt, part, value in (
        parts.select(*ROLLOUT_KEY, "part", "value").filter(pl.col("part") != "").iter_rows()
    ):
        by_rollout.setdefault((rollout_id, attempt), {})[part] = value
    rows = [(*key, json.dumps(shares, sort_keys=True, ensure_ascii=False)) for key, shares in by_rollout.items()]
    return pl.DataFrame(rows, schema={name: LEDGER[name] for name in (*ROLLOUT_KEY, "parts")}, orient="row")


def late_calls(now: pl.DataFrame, ledger: DatasetLedger) -> pl.DataFrame:
    """Used rollouts (rollout_id, attempt, current number of `calls`) with the number of `late` calls, which arrived after
    their dataset was built."""
    counted = ledger.rows.select(*ROLLOUT_KEY, pl.col("calls").alias("counted"))
    return (
        now.join(counted, on=ROLLOUT_KEY)
        .filter(pl.col("calls") > pl.col("counted"))
        .with_columns((pl.col("calls") - pl.col("counted")).alias("late"))
        .select(*ROLLOUT_KEY, "calls", "late")
    )


def late_evaluations(now: pl.DataFrame, ledger: DatasetLedger) -> pl.DataFrame:
    """rollout_id, `evaluations`, `rewards` and the number of `late` rewards, which arrived after the dataset that used the rollout
    was built, of the used rollouts with more evaluations than the ledger counted.

    `now` has the current numbers.
    """
    counted = ledger.used.group_by("rollout_id").agg(pl.col("rewards").max().alias("counted"))
    more = pl.col("rewards").cast(pl.Int64) - pl.col("counted")
    return (
        with_more_evaluations(now, ledger)
        .join(counted, on="rollout_id")
        .select("rollout_id", "evaluations", "rewards", more.clip(0).alias("late"))
    )


def with_more_evaluations(now: pl.DataFrame, ledger: DatasetLedger) -> pl.DataFrame:
    """The rows of `now` (with rollout_id and `evaluations`) of used rollouts of which the ledger counted fewer evaluations."""
    counted = ledger.used.group_by("rollout_id").agg(pl.col("evaluations").max().alias("counted"))
    return now.join(counted, on="rollout_id").filter(pl.col("evaluations") > pl.col("counted")).drop("counted")


def measure_coverage(
    reason_counts: pl.DataFrame, others: pl.DataFrame, lines: pl.DataFrame, late: pl.DataFrame
) -> Coverage:
    """Sums the REASON_COUNTS of calls with tokens, and of `others`, over the rollouts in `lines`; `late` are calls of rollouts
    that were used before.
    """
    counted = pl.concat([reason_counts, others]).join(lines, on=ROLLOUT_KEY, how="semi")
    dropped = _by_reason(counted)
    if late.height:
        dropped["late_after_consumed"] = int(late["late"].sum())
    rowless = lines.filter(pl.col("kept") == 0)
    pending = lines.filter("pending")
    may_come = counted.filter(~pl.col("reason").is_in(sorted(EXPECTED))).join(pending, on=ROLLOUT_KEY, how="semi")
    return Coverage(
        kept=int(lines["kept"].sum()),
        dropped=dropped,
        dropped_without_tokens=_by_reason(others.join(lines, on=ROLLOUT_KEY, how="semi")),
        rollouts_kept=lines.height - rowless.height,
        rollouts_seen=lines.height,
        dropped_rollouts=dict(rowless.drop_nulls("reason").group_by("reason").len().iter_rows()),
        rollouts_without_calls=rowless.filter(pl.col("reason").is_null()).height,
        pending_calls=int(may_come["calls"].sum()),
        pending_rollouts=pending.height,
    )


def _by_reason(counted: pl.DataFrame) -> dict[str, int]:
    return dict(counted.drop_nulls("reason").group_by("reason").agg(pl.col("calls").sum()).iter_rows())


def lines_to_write(
    lines: pl.DataFrame, late: pl.DataFrame, late_rewards: pl.DataFrame, ledger: DatasetLedger
) -> pl.DataFrame:
    """LEDGER rows of a new dataset, without pending rollouts, so that the next dataset counts those."""
    seen_again = late.select(*ROLLOUT_KEY, "late", pl.col("calls").alias("calls_now"))
    new_rewards = late_rewards.select("rollout_id", pl.col("evaluations", "rewards").name.suffix("_now"))
    later = (
        ledger.used.join(seen_again, on=ROLLOUT_KEY, how="left")
        .join(new_rewards, on="rollout_id", how="left")
        .filter(pl.col("calls_now").is_not_null() | pl.col("evaluations_now").is_not_null())
        .with_columns(
            pl.lit(0, dtype=pl.UInt32).alias("kept"),
            pl.when(pl.col("calls_now").is_not_null()).then(pl.lit("late_after_consumed")).alias("reason"),
            pl.lit(None, dtype=pl.String).alias("parts"),
            _braced(pl.format('"late_after_consumed": {}', "late")).alias("dropped"),
            pl.coalesce("calls_now", "calls").alias("calls"),
            *(pl.coalesce(f"{name}_now", name).alias(name) for name in ("evaluations", "rewards")),
        )
    )
    return pl.concat([frame.select(*LEDGER) for frame in (lines.filter(~pl.col("pending")), later)])


def check_outcome(
    coverage: Coverage,
    settings: DatasetSettings,
    where: str,
    reasons: Callable[[], Sequence[Reason]],
    *,
    may_be_empty: bool,
) -> None:
    """Raises NothingToTrainError if no call is trainable, or less than `min_coverage` of the calls that could be.

    `reasons` returns all reasons, worst first. `may_be_empty`: a round in which all rewards are equal is a dataset without rows,
    not a failure.
    """
    if coverage.seen and coverage.dropped_without_tokens.get("no_rollout") == coverage.seen:
        raise NothingToTrainError(
            f"{coverage.seen} model calls in {where} name no rollout and have no token ids: {NO_ROLLOUT_NAMED}",
            coverage.figures,
        )
    if not coverage.seen and coverage.rollouts_seen:
        many = "1 rollout" if coverage.rollouts_seen == 1 else f"{coverage.rollouts_seen} rollouts"
        raise NothingToTrainError(f"no call was recorded of the {many} in {where}: {_NO_CALL}", coverage.figures)
    if not coverage.seen:
        raise NothingToTrainError(
            f"no call in {where} is waiting for a dataset: run the agent first (`trainspan rollout --help`)",
            coverage.figures,
        )
    if not coverage.kept and not (may_be_empty and coverage.is_without_contrast):
        raise _nothing_to_train(f"none of {coverage.seen} calls in {where} is trainable", coverage, reasons())
    share = coverage.coverage
    if share is not None and share < settings.min_coverage:
        what = (
            f"only {share:.0%} of the calls in {where} are trainable, but --min-coverage is {settings.min_coverage:.0%}"
        )
        raise _nothing_to_train(what, coverage, reasons())


def _nothing_to_train(what: str, coverage: Coverage, reasons: Sequence[Reason]) -> NothingToTrainError:
    worst = reasons[0]
    return NothingToTrainError(
        f"{what}; most excluded by {worst.name} ({worst.calls}): {worst.advice}",
        {**coverage.figures, "reasons": [asdict(reason) for reason in reasons]},
        [str(reason) for reason in reasons],
    )


def check_policies(rows: Mapping[str, int], where: str) -> None:
    """Raises DatasetError if the rows (policy → number) come from several policies: a dataset trains one model."""
    if len(rows) > 1:
        counted = ", ".join(f"{name} ({count})" for name, count in sorted(rows.items()))
        raise DatasetError(
            f"the trainable calls in {where} are from {len(rows)} policies: {counted}; a dataset has one policy: name it with "
            "--policies, and give each policy a separate --out, since a folder uses a rollout only once"
        )
