"""Finds which of several answers to one request (n > 1, best of n) the agent continued with.

An answer was used if the prompt of a later call of its rollout begins with its whole sequence, token for token. If that
holds for no answer of a request, it is unknown which one was used (it was the last request, or the history was rewritten),
and all of them count as used.
"""

from collections.abc import Iterable

import numpy as np
import polars as pl

from trainspan_processing.read.source import Source
from trainspan_processing.read.tokens import Tokens, chunks_of_rollouts, read_tokens
from trainspan_processing.reasons.drop_reasons import admitted_reasons, call_reason
from trainspan_processing.reasons.overlong import is_overlong
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY, empty
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["unused", "unused_overlong"]


def unused_overlong(source: Source, traces: TraceIndex, settings: DatasetSettings) -> pl.DataFrame:
    """trace_id, span_id of the answers cut off by length that the agent did not use (`unused`).

    Tokens are read only for rollouts with such an answer among several to the same request.
    """
    nothing = pl.lit(None, dtype=pl.String)
    reason = call_reason(admitted_reasons(settings.admit))
    sound = traces.calls.with_columns(nothing.alias("rollout_reason")).filter(reason.is_null())
    request = [*ROLLOUT_KEY, "response_id"]
    several = pl.col("response_id").is_not_null() & (pl.len().over(request) > 1) & is_overlong().any().over(request)
    asked = sound.join(sound.filter(several).select(ROLLOUT_KEY), on=ROLLOUT_KEY, how="semi", maintain_order="left")
    asked = asked.with_columns(pl.struct(ROLLOUT_KEY).rank("dense").alias("rollout"))
    frames = [empty(dict.fromkeys(SPAN_KEY, pl.String))]
    for chunk in chunks_of_rollouts(asked):
        payload = read_tokens(source, chunk, (*SPAN_KEY, "prompt_ids", "completion_ids"), traces.answers)
        whole = chunk.join(payload, on=SPAN_KEY, how="left", maintain_order="left")
        frames.append(whole.filter(unused(whole) & is_overlong()).select(SPAN_KEY))
    return pl.concat(frames)


def unused(calls: pl.DataFrame) -> pl.Series:
    """(C,) whether each call is an answer that the agent did not use, although it used another answer to the same request.

    `calls` have rollout (u32), response_id, position, prompt_ids and completion_ids, in the order of rollouts and positions.
    One response may answer several prompts (`/v1/completions` with a list), each with answers of its own.
    """
    prompts, completions = Tokens.of(calls["prompt_ids"]), Tokens.of(calls["completion_ids"])
    rows = calls.select("rollout", "response_id", "position").with_row_index("row")
    several = rows.filter(pl.col("response_id").is_not_null() & (pl.len().over("rollout", "response_id") > 1))
    several = several.with_columns(calls["prompt_ids"].gather(several["row"]).hash().alias("prompt"))
    several = several.filter(pl.len().over("rollout", "response_id", "prompt") > 1)
    flags = np.zeros(calls.height, dtype=np.bool_)
    if several.is_empty():
        return pl.Series("unused", flags)
    ends = dict(rows.group_by("rollout").agg(pl.col("row").max() + 1).iter_rows())
    for (rollout, *_), answers in several.group_by("rollout", "response_id", "prompt", maintain_order=True):
        same = answers["row"].to_list()
        later = range(same[-1] + 1, ends[rollout])
        used = [_is_used(row, later, prompts, completions) for row in same]
        if any(used):
            flags[[row for row, is_used in zip(same, used, strict=True) if not is_used]] = True
    return pl.Series("unused", flags)


def _is_used(row: int, later: Iterable[int], prompts: Tokens, completions: Tokens) -> bool:
    prompt, completion = prompts[row], completions[row]
    start, end = len(prompt), len(prompt) + len(completion)
    return len(completion) > 0 and any(
        np.array_equal(prompts[call][start:end], completion) and np.array_equal(prompts[call][:start], prompt)
        for call in later
    )
