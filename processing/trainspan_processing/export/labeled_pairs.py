"""Pairs of rollouts of which a person said which one is better."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import polars as pl

from trainspan_processing.read.source import Source
from trainspan_processing.rewards.labels import read_labels
from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.store.labels import newest

__all__ = ["LEFT_OUT", "LabeledPair", "labeled_pairs"]

LEFT_OUT: Final = (
    *("validation", "not_selected", "superseded_by_retry", "id_collision", "attempt_conflict", "unfinished"),
)
"""Reasons of rollouts that are in no pair and no trajectory. Others, such as a missing or an equal reward, say nothing about either."""

LabeledPair = tuple[tuple[str, int], tuple[str, int]]
"""Rollout id and attempt of the better one and of the worse one."""


def labeled_pairs(source: Source, rollouts: pl.DataFrame) -> tuple[list[LabeledPair], Counter[str]]:
    """The pairs within `rollouts` (rollout_id, attempt, task_id, reason), by their newest labels that are not withdrawn.

    Also counts those without a pair: `labeled_equal`, and `labeled_not_selected` if only one of the two is within `rollouts`.
    """
    is_branch = pl.col("task_id").str.contains(BRANCH_TASK).fill_null(value=False)
    is_left_out = pl.col("reason").is_in(LEFT_OUT).fill_null(value=False)
    keys: Sequence[tuple[str, int]] = rollouts.filter(~is_branch & ~is_left_out).select("rollout_id", "attempt").rows()
    known, skipped = frozenset(keys), Counter[str]()
    pairs: list[LabeledPair] = []
    for label in newest(read_labels(source, sorted({rollout_id for rollout_id, _ in known}))).values():
        if label.other is None or label.is_withdrawn:
            continue
        one, other = (label.rollout_id, label.attempt), label.other
        if one not in known or other not in known:
            skipped["labeled_not_selected"] += 1
        elif label.word == "equal":
            skipped["labeled_equal"] += 1
        else:
            pairs.append((one, other) if label.word == "better" else (other, one))
    return sorted(pairs), skipped
