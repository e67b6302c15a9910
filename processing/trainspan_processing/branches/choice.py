"""Chooses the calls whose advantages are measured, and with them the states to branch from."""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, replace

import polars as pl

from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry.status import CallKind, kind_named

__all__ = ["CallChoice", "branch_points"]

_CUT = "after a call that was not answered whole, or has images"
_BITS = 53
"""Of a hash, as many as a float has."""


@dataclass(frozen=True, slots=True)
class CallChoice:
    """Which calls of each rollout to measure.

    Whether a call is chosen depends on nothing that happens in or after it, neither its answer nor the length of its rollout:
    else values would be known where rollouts went well or badly, and the advantages of the others would be biased.
    """

    agent: str | None = None
    """Only calls of this agent."""
    kind: CallKind | None = None
    """Only calls of this kind."""
    share: float = 1.0
    """The probability with which each of them is chosen, above 0."""

    @classmethod
    def parse(cls, text: str) -> "CallChoice":
        """Parses `all`, `random:0.25`, `agent:NAME`, `kind:NAME`, or several of them with commas. Raises UsageError."""
        choice = cls()
        for part in filter(None, (item.strip() for item in text.split(","))):
            by, _, value = part.partition(":")
            if by == "agent" and value:
                choice = replace(choice, agent=value)
            elif kind := kind_named(part):
                choice = replace(choice, kind=kind)
            elif by == "random" and re.fullmatch(r"\d*\.?\d+", value) and 0 < float(value) <= 1:
                choice = replace(choice, share=float(value))
            elif part != "all":
                raise UsageError(
                    f"calls = {text!r}: use all, random:0.25, agent:NAME, kind:NAME, or several, as agent:NAME,random:0.25"
                )
        return choice

    def of(self, states: pl.DataFrame) -> pl.DataFrame:
        """The chosen rows of STATES."""
        eligible = states if self.agent is None else states.filter(pl.col("agent") == self.agent)
        eligible = eligible if self.kind is None else eligible.filter(pl.col("call_kind") == self.kind)
        if self.share >= 1:
            return eligible
        keys = eligible.select(*ROLLOUT_KEY, "call").iter_rows()
        return eligible.filter(pl.Series([_fraction(*key) < self.share for key in keys], dtype=pl.Boolean))


def _fraction(rollout_id: str, attempt: int, call: int) -> float:
    """A hash of a call, uniform in [0, 1): the same in every run, so that branches can be resumed."""
    digest = hashlib.blake2b(f"{rollout_id}.{attempt}@{call}".encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> (64 - _BITS)) / float(2**_BITS)


def branch_points(states: pl.DataFrame, choice: CallChoice, known: pl.DataFrame) -> tuple[pl.DataFrame, Counter[str]]:
    """The states whose values are to be measured (rollout_id, attempt, `call`); reason → how many of them cannot be.

    An advantage needs the values before and after its call. The value after a rollout's last call is its reward, and that of
    the first state comes from its group, if `known` (rollout_id, attempt) has it.
    """
    chosen = choice.of(states)
    ends = states.group_by(ROLLOUT_KEY).agg(pl.len().cast(pl.Int32).alias("_end"))
    cut = states.filter(~pl.col("can_repeat")).group_by(ROLLOUT_KEY).agg(pl.col("call").min().alias("_cut"))
    key = [*ROLLOUT_KEY, "call"]
    points = (
        pl.concat([chosen.select(key), chosen.select(*ROLLOUT_KEY, pl.col("call") + 1)])
        .unique()
        .join(ends, on=ROLLOUT_KEY)
        .join(states.select(*key, "obstacle"), on=key, how="left")
        .join(cut, on=ROLLOUT_KEY, how="left")
        .join(known.select(ROLLOUT_KEY).with_columns(pl.lit(value=True).alias("_known")), on=ROLLOUT_KEY, how="left")
        .filter((pl.col("call") < pl.col("_end")) & ((pl.col("call") > 0) | pl.col("_known").is_null()))
        .sort(key)
    )
    is_cut = (pl.col("call") > pl.col("_cut")).fill_null(value=False)
    judged = points.with_columns(pl.when(is_cut).then(pl.lit(_CUT)).otherwise("obstacle").alias("obstacle"))
    skipped = Counter(judged["obstacle"].drop_nulls().to_list())
    return judged.filter(pl.col("obstacle").is_null()).select(key), skipped
