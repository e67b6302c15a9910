"""The second pass: reads tokens chunk by chunk, so that memory does not grow with the dataset."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainspan_processing.read.json_attributes import with_facts
from trainspan_processing.read.source import SEQS_PER_READ, Source
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY, TOKENS, Schema, empty
from trainspan_schemas.telemetry import keys

__all__ = ["Tokens", "chunk_number", "chunks_of_rollouts", "read_tokens", "token_batches", "token_reads"]

CALLS_PER_CHUNK: Final = 8_192
TOKENS_PER_CHUNK: Final = 8_388_608
"""32 MiB of ids; a few copies of a chunk are in memory at once."""

_NUMBERS: Final = {"constraint_start": keys.CONSTRAINT_START}
_TEXTS: Final = {"constraint": keys.SAMPLING_CONSTRAINT}
"""Columns of TOKENS from the column `call_facts`."""


Int = NDArray[np.int64]


class Tokens:
    """C lists of int32 within one array: list c is `values[starts[c]:starts[c] + lengths[c]]`."""

    __slots__ = ("lengths", "starts", "values")

    def __init__(self, values: NDArray[np.int32], starts: Int, lengths: Int) -> None:
        self.values, self.starts, self.lengths = values, starts, lengths

    @classmethod
    def of(cls, lists: pl.Series) -> "Tokens":
        """The lists of a column."""
        # Read from Arrow's buffers, since `to_numpy` of an Arrow array imports pandas.
        array = lists.cast(pl.List(pl.Int32)).rechunk().to_arrow()
        offsets = np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + len(array) + 1]
        values = array.values
        data = values.buffers()[1]
        ids = np.frombuffer(data, dtype=np.int32) if data else np.empty(0, dtype=np.int32)
        return cls(ids[values.offset : values.offset + len(values)], offsets[:-1], np.diff(offsets))

    def select(self, order: Int) -> "Tokens":
        """The lists in another order, or some of them; no token is copied."""
        return Tokens(self.values, self.starts[order], self.lengths[order])

    def __getitem__(self, call: int) -> NDArray[np.int32]:
        start = self.starts[call]
        return self.values[start : start + self.lengths[call]]


def chunk_number(calls: pl.Series, tokens: pl.Series) -> pl.Series:
    """The chunk (u32) of each item in order, from its numbers of calls and tokens.

    It depends on the items before, not on the stores, so the same rows give the same bytes. A chunk has at most
    CALLS_PER_CHUNK calls and TOKENS_PER_CHUNK tokens, unless its only item has more.
    """
    sums = [np.cumsum(counts.to_numpy(), dtype=np.int64) for counts in (calls, tokens)]
    numbers = np.zeros(len(calls), dtype=np.uint32)
    start, number = 0, 0
    while start < len(numbers):
        before = [int(total[start - 1]) if start else 0 for total in sums]
        limits = (before[0] + CALLS_PER_CHUNK, before[1] + TOKENS_PER_CHUNK)
        ends = [int(np.searchsorted(total, limit, side="right")) for total, limit in zip(sums, limits, strict=True)]
        end = max(start + 1, min(ends))
        numbers[start:end] = number
        start, number = end, number + 1
    return pl.Series("chunk", numbers)


def chunks_of_rollouts(calls: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """`calls` (sorted by rollout) in chunks of whole rollouts, in order."""
    if calls.is_empty():
        return
    sizes = calls.group_by(ROLLOUT_KEY, maintain_order=True).agg(pl.len().alias("calls"), pl.col("n_tokens").sum())
    numbers = sizes.select(*ROLLOUT_KEY, chunk_number(sizes["calls"], sizes["n_tokens"]))
    numbered = calls.join(numbers, on=ROLLOUT_KEY, nulls_equal=True, maintain_order="left")
    yield from numbered.partition_by("chunk", maintain_order=True, include_key=False)


def read_tokens(
    source: Source, calls: pl.DataFrame, columns: Sequence[str] = tuple(TOKENS), answers: pl.DataFrame | None = None
) -> pl.DataFrame:
    """TOKENS (its `columns`) of `calls` (with `store`, `seq`, `constrained`); `answers` holds TOKENS of client-only calls."""
    frames = [empty({name: TOKENS[name] for name in columns})]
    if answers is not None and answers.height:
        frames.append(answers.join(calls.select(SPAN_KEY), on=SPAN_KEY, how="semi").select(*columns))
    return pl.concat([*frames, *token_batches(source, calls, columns)])


def token_reads(calls: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The stored ones of `calls` (with `store`, `seq`, `constrained`) in frames for `token_batches`, each sorted by `seq`.

    A frame is a stretch of one store that the store returns in one answer.
    """
    stored = calls.drop_nulls("seq").with_columns(pl.col("constrained").fill_null(value=True)).sort("seq")
    for part in stored.partition_by("store", "constrained"):
        yield from part.iter_slices(SEQS_PER_READ)


def token_batches(
    source: Source, calls: pl.DataFrame, columns: Sequence[str] = tuple(TOKENS)
) -> Iterator[pl.DataFrame]:
    """TOKENS and `seq` (of these `columns`) of the stored ones of `calls` (with `store`, `seq`, `constrained`), about in the
    stores' order.

    The facts of calls, which hold constraints, are read only of those that may be constrained: the others have none.
    """
    known: Schema = {"seq": pl.Int64, **TOKENS}
    schema = {name: known[name] for name in columns}
    numbers, texts = ({name: key for name, key in of.items() if name in schema} for of in (_NUMBERS, _TEXTS))
    facts = {*numbers, *texts}
    asked = [name for name in columns if name not in facts]
    absent = [pl.lit(None, dtype=schema[name]).alias(name) for name in sorted(facts)]
    is_free = ~pl.col("constrained").fill_null(value=True) if facts else pl.lit(value=True)
    for (store,), part in calls.drop_nulls("seq").partition_by("store", as_dict=True).items():
        for batch in source.tokens(int(str(store)), _seqs(part.filter(is_free)), asked):
            yield _cast(batch.with_columns(absent), schema)
        for batch in source.tokens(int(str(store)), _seqs(part.filter(~is_free)), [*asked, "call_facts"]):
            yield _cast(with_facts(batch, numbers=numbers, booleans={}, texts=texts), schema)


def _seqs(calls: pl.DataFrame) -> list[int]:
    return calls["seq"].sort().to_list()


def _cast(batch: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    return batch.select(pl.col(name).cast(kind) for name, kind in schema.items())
