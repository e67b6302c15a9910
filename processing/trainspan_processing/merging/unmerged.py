"""Lists the rows that do not continue their agent's previous row, each with its cause."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from trainspan_processing.dataset.published import Published
from trainspan_processing.merging.divergence import Divergence, diverge
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.text.token_text import Decoder

__all__ = ["MOST_LOOKED_AT", "Unmerged", "find_unmerged", "first_of_each", "unmerged_rows"]

MOST_LOOKED_AT: Final = 1_000
"""Maximum number of rows, from the first on, whose tokens are read to find their causes."""

_FACTS: Final = [*ROLLOUT_KEY, "agent", "call_index", "segment_pos", *SPAN_KEY]
_TOKENS: Final = ["prompt_ids", "completion_ids"]
_CHUNK: Final = 64


@dataclass(frozen=True, slots=True)
class Unmerged:
    """One row that opens a segment even though its agent has an earlier trained call."""

    rollout_id: str
    attempt: int
    agent: str | None
    call_index: int
    after: int
    """Index of the previous call."""
    trace_id: str
    span_id: str
    divergence: Divergence


def unmerged_rows(dataset: Published, decoder: Decoder | None) -> Iterator[Unmerged]:
    """Yields the unmerged rows of a dataset on disk, at most MOST_LOOKED_AT."""

    def tokens(rows: Sequence[int]) -> pl.DataFrame:
        return dataset.rows_at(rows, _TOKENS)

    yield from _unmerged(dataset.rows(_FACTS), tokens, decoder)


def find_unmerged(rows: pl.DataFrame, decoder: Decoder | None) -> Iterator[Unmerged]:
    """Yields the unmerged rows among a dataset's rows, in its order; at most MOST_LOOKED_AT."""
    yield from _unmerged(rows, lambda places: rows[places].select(_TOKENS), decoder)


def first_of_each(calls: Iterable[Unmerged]) -> list[tuple[int, Unmerged]]:
    """(count, first example) of each cause, most frequent first."""
    counts: Counter[str] = Counter()
    firsts: dict[str, Unmerged] = {}
    for call in calls:
        counts[call.divergence.cause] += 1
        firsts.setdefault(call.divergence.cause, call)
    return [(count, firsts[cause]) for cause, count in counts.most_common()]


def _unmerged(
    rows: pl.DataFrame, tokens: Callable[[Sequence[int]], pl.DataFrame], decoder: Decoder | None
) -> Iterator[Unmerged]:
    """Yields the unmerged rows; `tokens` returns _TOKENS of the rows at the given places."""
    places = pl.int_range(pl.len(), dtype=pl.Int64).alias("row")
    numbered = rows.select(*_FACTS, places)
    of_agent = [*ROLLOUT_KEY, "agent"]
    before = [
        pl.col(name).shift(1).over(of_agent).alias(to) for name, to in (("row", "before"), ("call_index", "after"))
    ]
    openers = numbered.with_columns(before).filter((pl.col("segment_pos") == 0) & pl.col("before").is_not_null())
    for part in openers.head(MOST_LOOKED_AT).iter_slices(_CHUNK):
        wanted = sorted({*part["row"].to_list(), *part["before"].to_list()})
        frame = tokens(wanted)
        prompts, answers = (
            {number: np.array(ids, dtype=np.int32) for number, ids in zip(wanted, frame[name], strict=True)}
            for name in _TOKENS
        )
        for row in part.iter_rows(named=True):
            prompt, earlier = prompts[row["row"]], (prompts[row["before"]], answers[row["before"]])
            ids = (int(side.max(initial=0)) for side in (prompt, *earlier))
            known = decoder if decoder is not None and decoder.covers(ids) else None
            names = ("rollout_id", "attempt", "agent", "call_index", "after", "trace_id", "span_id")
            yield Unmerged(**{name: row[name] for name in names}, divergence=diverge(earlier, prompt, known))
