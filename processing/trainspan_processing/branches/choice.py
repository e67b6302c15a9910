"""Chooses the calls whose advantages are measured, and with them the states to branch from."""

from dataclasses import dataclass

import polars as pl

from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_schemas.errors import UsageError

__all__ = ["CallChoice", "branch_points"]


@dataclass(frozen=True, slots=True)
class CallChoice:
    """Which calls of each rollout to measure."""

    agent: str | None = None
    """Only calls of this agent."""
    most_uncertain: int | None = None
    """Only this many, those of the highest entropy; None: all."""

    @classmethod
    def parse(cls, text: str) -> "CallChoice":
        """Parses `all`, `entropy:2`, `agent:NAME`, or two of them with a comma. Raises UsageError."""
        choice = cls()
        for part in filter(None, (item.strip() for item in text.split(","))):
            kind, _, value = part.partition(":")
            if kind == "agent" and value:
                choice = cls(value, choice.most_uncertain)
            elif kind == "entropy" and value.isdecimal() and int(value) > 0:
                choice = cls(choice.agent, int(value))
            elif part != "all":
                raise UsageError(f"calls = {text!r}: use all, entropy:2, agent:NAME, or agent:NAME,entropy:2")
        return choice

    def of(self, states: pl.DataFrame) -> pl.DataFrame:
        """The chosen rows of STATES."""
        found = states if self.agent is None else states.filter(pl.col("agent") == self.agent)
        if self.most_uncertain is None:
            return found
        rank = pl.col("entropy").fill_null(-1.0).rank("ordinal", descending=True).over(ROLLOUT_KEY)
        return found.filter(rank <= self.most_uncertain)


def branch_points(states: pl.DataFrame, choice: CallChoice, known: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """The states whose values are to be measured (rollout_id, attempt, `call`), and how many of them cannot be repeated.

    An advantage needs the values before and after its call. The value after a rollout's last call is its reward, and that of
    the first state comes from its group, if `known` (rollout_id, attempt) has it.
    """
    chosen = choice.of(states)
    ends = states.group_by(ROLLOUT_KEY).agg(pl.len().cast(pl.Int32).alias("_end"))
    cut = states.filter(~pl.col("can_repeat")).group_by(ROLLOUT_KEY).agg(pl.col("call").min().alias("_cut"))
    own = [*ROLLOUT_KEY, "call"]
    points = (
        pl.concat([chosen.select(own), chosen.select(*ROLLOUT_KEY, pl.col("call") + 1)])
        .unique()
        .join(ends, on=ROLLOUT_KEY)
        .join(cut, on=ROLLOUT_KEY, how="left")
        .join(known.select(ROLLOUT_KEY).with_columns(pl.lit(value=True).alias("_known")), on=ROLLOUT_KEY, how="left")
        .filter((pl.col("call") < pl.col("_end")) & ((pl.col("call") > 0) | pl.col("_known").is_null()))
        .sort(own)
    )
    reachable = points.filter((pl.col("call") <= pl.col("_cut")).fill_null(value=True))
    return reachable.select(own), points.height - reachable.height
