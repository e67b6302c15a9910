"""Reads the calls of a stored rollout in the form in which a policy server repeats them."""

import threading
from collections import OrderedDict
from typing import Any

import polars as pl

from trainspan_processing.read.source import Source
from trainspan_processing.read.tokens import read_tokens
from trainspan_processing.tables import SPAN_KEY
from trainspan_schemas.artifacts.branches import BranchPoint, StoredCalls
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.prefix import ForcedCall, ForcedChoice, prompt_digest
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs

__all__ = ["StoredCallReader"]

_KEPT = 64
"""Rollouts whose calls are kept in memory: the branches of one rollout begin one after another."""


class StoredCallReader:
    """A BranchSource over open stores."""

    def __init__(self, source: Source, calls: pl.DataFrame) -> None:
        """`calls` are CALLS of a trace index, in its order, with the rollouts of every point."""
        self._source, self._calls = source, calls
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], list[ForcedCall]] = OrderedDict()

    def calls(self, point: BranchPoint) -> StoredCalls:
        """The calls around the point. Raises InvalidRecordError if the rollout is not known or too short, StoreError."""
        with self._lock:
            calls = self._rollout(point.rollout_id, point.attempt)
        starts = [index for index, call in enumerate(calls) if not index or call.index != calls[index - 1].index]
        if not point.call < len(starts):
            raise InvalidRecordError(f"rollout {point.rollout_id} has {len(starts)} calls, no call {point.call}")
        start = starts[point.call]
        later = tuple(prompt_digest(call.prompt) for call in calls[start:])
        return StoredCalls(tuple(calls[:start]), later, calls[start].prompt)

    def _rollout(self, rollout_id: str, attempt: int) -> list[ForcedCall]:
        key = (rollout_id, attempt)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        of_rollout = self._calls.filter((pl.col("rollout_id") == rollout_id) & (pl.col("attempt") == attempt))
        columns = (*SPAN_KEY, "prompt_ids", "completion_ids", "logprobs")
        calls = of_rollout.join(read_tokens(self._source, of_rollout, columns), on=SPAN_KEY, maintain_order="left")
        self._kept[key] = _forced_calls(calls.iter_rows(named=True))
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]


def _forced_calls(rows: Any) -> list[ForcedCall]:
    """The generations of a rollout in order: rows of one request that have the same prompt are its choices."""
    by_request: dict[tuple[int, bytes], list[ForcedChoice]] = {}
    versions: dict[tuple[int, bytes], int | None] = {}
    for row in rows:
        key = (row["call_index"], encode_ids(row["prompt_ids"]))
        choice = ForcedChoice(
            encode_ids(row["completion_ids"]), encode_logprobs(row["logprobs"]), row["finish_reason"] or ""
        )
        by_request.setdefault(key, []).append(choice)
        versions[key] = row["policy_version"]
    return [ForcedCall(*key, tuple(choices), versions[key]) for key, choices in by_request.items()]
