"""The second pass: reads tokens chunk by chunk, so that memory does not grow with the dataset."""

from collections.abc import Iterator, Sequence
from typing import Final

import polars as pl

from .frames import PAYLOAD, ROLLOUT_KEY, SPAN_KEY, empty
from .source import Selection, Source

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
    source: Source,
    calls: pl.DataFrame,
    whole: Selection | None = None,
    columns: Sequence[str] = tuple(PAYLOAD),
    answers: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """PAYLOAD (its `columns`) of at least `calls` (with `store`); by `whole` where they are all of that selection.

    `answers` is PAYLOAD of the calls that only clients recorded.
    """
    schema = {name: PAYLOAD[name] for name in columns}
    frames = [empty(schema)]
    if answers is not None and answers.height:
        frames.append(answers.join(calls.select(SPAN_KEY), on=SPAN_KEY, how="semi").select(*schema))
    parts = calls.partition_by("store", as_dict=True)
    for (store,), part in parts.items():
        selection = whole or Selection(rollout_ids=part["rollout_id"].unique().sort().to_list())
        frames += [
            batch.select(pl.col(name).cast(kind) for name, kind in schema.items())
            for batch in source.read("calls", selection, columns, store=int(str(store)))
        ]
    payload = pl.concat(frames)
    return payload.unique(SPAN_KEY, keep="first") if len(parts) > 1 else payload
