"""Several answers to one request (n > 1, best of n): which of them the agent went on with.

An answer was used if the prompt of a later call of its rollout begins with its whole sequence, token for token. If that
holds for no answer of a request, nothing tells which one was used (it was the last request, or the history was rewritten),
and all of them count as used.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import polars as pl

from trainspan_schemas.errors import UsageError

from .lineage import Tokens

__all__ = ["CHOICES", "check_choices", "unused"]

CHOICES: Final = ("used", "all")


def check_choices(name: str) -> str:
    """The setting. Raises UsageError for an unknown one."""
    if name not in CHOICES:
        raise UsageError(f"choices = {name!r}: take one of {', '.join(CHOICES)}")
    return name


def unused(calls: pl.DataFrame, prompts: Tokens, completions: Tokens) -> pl.Series:
    """(C,) whether each call is an answer that the agent did not use although it used another one to the same request.

    `calls` have rollout (u32), response_id and position, in the order of rollouts and positions.
    """
    rows = calls.select("rollout", "response_id", "position").with_row_index("row")
    several = rows.filter(pl.col("response_id").is_not_null() & (pl.len().over("rollout", "response_id") > 1))
    found = np.zeros(calls.height, dtype=np.bool_)
    if several.is_empty():
        return pl.Series("unused", found)
    ends = dict(rows.group_by("rollout").agg(pl.col("row").max() + 1).iter_rows())
    for (rollout, _), answers in several.group_by("rollout", "response_id", maintain_order=True):
        same = answers["row"].to_list()
        later = range(same[-1] + 1, ends[rollout])
        used = [_is_used(row, later, prompts, completions) for row in same]
        if any(used):
            found[[row for row, is_used in zip(same, used, strict=True) if not is_used]] = True
    return pl.Series("unused", found)


def _is_used(row: int, later: Iterable[int], prompts: Tokens, completions: Tokens) -> bool:
    prompt, completion = prompts[row], completions[row]
    start, end = len(prompt), len(prompt) + len(completion)
    return len(completion) > 0 and any(
        np.array_equal(prompts[call][start:end], completion) and np.array_equal(prompts[call][:start], prompt)
        for call in later
    )
