"""Credit from measured values of states: the advantage of a call is the value after it less the value before it.

VinePPO, arXiv 2410.01679, eq. 6, for whole calls: V(s) is the mean reward of branches from s (`trainspan branch`). The value
after a rollout's last call is its return, and that of its first state is the baseline's, unless branches measured it.
Consecutive calls without a measured value between them count as one: each gets the difference over all of them. Without any
measured value this is `identical` with the same baseline. Advantages are in units of reward, so that their sum over such
blocks is R − V(s_0).
"""

from collections.abc import Sequence
from typing import Final

import polars as pl

from trainspan_processing.credit.baselines import are_equal
from trainspan_processing.read.measurements import Measured, Measurement, own_scores
from trainspan_processing.read.source import Source
from trainspan_processing.tables import SPAN_KEY
from trainspan_schemas.errors import UsageError

__all__ = ["VINE", "check_vine", "state_values", "vine_terms"]

VINE: Final = "vine"
_UNSCALED: Final = ("dr_grpo", "rloo", "running", "rae")
"""Baselines that estimate the value of the first state in units of reward."""


def state_values(source: Source, calls: pl.DataFrame, reward: Sequence[str]) -> tuple[pl.DataFrame, int]:
    """CALLS with `state_value` (f64): the newest value of the state before each that branches measured, else NULL.

    Values of other policy versions than the rollout's, or of another reward than `reward` (a `reward_definition`), are left
    out; returns also the number of calls that have only such values.
    """
    measured, ignored = own_scores(source, calls, _value_by_branches, reward)
    values = measured.select(*SPAN_KEY, pl.col("score").alias("state_value"))
    return calls.join(values, on=SPAN_KEY, how="left", maintain_order="left"), ignored


def _value_by_branches(measurement: Measurement) -> Measured | None:
    return None if measurement.is_start else measurement.value


def vine_terms(calls: pl.DataFrame) -> pl.DataFrame:
    """The calls with the `value` after and the `center` before their block, `scale` 1 and `drop`.

    `calls` have rollout, position, `state_value`, `return` (of their rollout), and the baseline's `center` and `drop` for it.
    A block is dropped for the baseline's reason if it is the whole rollout, or if it begins at a first state of unknown value.
    """
    is_first = pl.col("position") == pl.col("position").min().over("rollout")
    # The baseline has no center for a group that it cannot compare: a single return says nothing, equal ones are their mean.
    start = pl.when(pl.col("drop").is_null()).then("center").when(pl.col("drop") == "zero_spread_group").then("return")
    known = pl.when(is_first).then(pl.coalesce("state_value", start)).otherwise("state_value")
    measured = calls.sort("rollout", "position").with_columns(known.alias("_before"))
    measured = measured.with_columns(pl.col("_before").shift(-1).over("rollout").alias("_after"))
    ends = pl.coalesce(pl.col("_after").backward_fill().over("rollout"), "return")
    begins = pl.col("_before").forward_fill().over("rollout")
    is_whole = pl.col("state_value").is_null().all().over("rollout")
    drop = pl.when(is_whole | begins.is_null()).then("drop")
    measured = measured.with_columns(ends.alias("value"), begins.alias("_begin"), drop.alias("drop"))
    says_nothing = pl.col("drop").is_not_null()
    center = pl.when(are_equal(pl.col("value"), pl.col("_begin"))).then("value").otherwise("_begin")
    return measured.with_columns(
        pl.when(says_nothing).then(0.0).otherwise(center).alias("center"),
        pl.when(says_nothing).then(0.0).otherwise(1.0).alias("scale"),
    ).drop("_before", "_after", "_begin")


def check_vine(baseline: str, *, combine: str, group_over: str, per_agent: bool) -> None:
    """Raises UsageError for a setting that does not go with measured values."""
    if baseline not in _UNSCALED:
        raise UsageError(
            f"credit {VINE!r} measures advantages in units of reward, which baseline {baseline!r} does not keep: use baseline "
            f"{', '.join(_UNSCALED[:-1])} or {_UNSCALED[-1]}"
        )
    if per_agent or combine != "sum" or group_over != "rollouts":
        raise UsageError(
            f"credit {VINE!r} compares states of whole rollouts and their total reward: leave agent_credit, combine and "
            "group_over at their defaults"
        )
