"""The second pass: reads tokens chunk by chunk, so that memory does not grow with the dataset."""

from collections.abc import Iterator, Sequence
from typing import Final

import polars as pl

from .frames import PAYLOAD, ROLLOUT_KEY, SPAN_KEY, empty
from .source import Source

__all__ = ["CALLS_PER_CHUNK", "chunks_of_rollouts", "read_payload"]

CALLS_PER_CHUNK: Final = 8_192


def chunks_of_rollouts(calls: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """`calls` (sorted by rollout) in chunks of whole rollouts of about CALLS_PER_CHUNK calls, in order."""
    if calls.is_empty():
        return
    # The chunk of a rollout follows from the calls before it, not from the stores: the same rows give the same bytes.
    first = pl.col("row").min().over(ROLLOUT_KEY)
    numbered = calls.with_row_index("row").with_columns((first // CALLS_PER_CHUNK).alias("chunk")).drop("row")
    yield from numbered.partition_by("chunk", maintain_order=True, include_key=False)


def read_payload(
    source: Source, calls: pl.DataFrame, columns: Sequence[str] = tuple(PAYLOAD), answers: pl.DataFrame | None = None
) -> pl.DataFrame:
    """PAYLOAD (its `columns`) of `calls` (with `store` and `seq`); `answers` is that of calls that only clients recorded."""
    schema = {name: PAYLOAD[name] for name in columns}
    frames = [empty(schema)]
    if answers is not None and answers.height:
        frames.append(answers.join(calls.select(SPAN_KEY), on=SPAN_KEY, how="semi").select(*schema))
    for (store,), part in calls.drop_nulls("seq").partition_by("store", as_dict=True).items():
        frames += [
            batch.select(pl.col(name).cast(kind) for name, kind in schema.items())
            for batch in source.tokens(int(str(store)), part["seq"].sort().to_list(), columns)
        ]
    return pl.concat(frames)
