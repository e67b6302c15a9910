"""What a batch of spans adds to the metrics: conventions, and calls that cannot be trained on or are stale."""

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute

from trainspan_collector.metrics import LoadCounts
from trainspan_schemas import keys

__all__ = ["LoadCounting"]

pc: Any = pyarrow.compute  # its functions are made when it is imported

_DIALECTS: Final = (
    ("openinference", "openinference.span.kind"),
    ("traceloop", "llm.request.type"),
    ("traceloop", "traceloop.span.kind"),
    ("gen_ai", keys.GEN_AI_OPERATION),
)
"""Convention → a key that its spans bear; the first that fits counts."""


class LoadCounting:
    """Counts batches of spans and tells `on_loaded`. For one thread."""

    def __init__(self, on_loaded: Callable[[LoadCounts], None]) -> None:
        self._on_loaded = on_loaded
        self._newest_versions: dict[str | None, int] = {}

    def count(self, spans: pa.Table | None, duplicates: int) -> None:
        """`spans` as `rows.span_table` makes them."""
        if spans is None:
            self._on_loaded(LoadCounts(duplicates))
            return
        calls = spans.filter(spans["is_call"])
        self._on_loaded(
            LoadCounts(
                duplicates=duplicates,
                dialects=_dialects(spans),
                calls=calls.num_rows,
                untrainable_calls=_untrainable(calls),
                stale_calls=self._stale(calls),
            )
        )

    def _stale(self, calls: pa.Table) -> int:
        n_stale = 0
        versions = calls.select(["policy_name", "policy_version"]).to_pylist()
        for policy, version in (tuple(row.values()) for row in versions):
            if version is None:
                continue
            newest = self._newest_versions.setdefault(policy, version)
            n_stale += version < newest
            self._newest_versions[policy] = max(newest, version)
        return n_stale


def _dialects(spans: pa.Table) -> dict[str, int]:
    left = pc.invert(spans["is_call"])
    counts = {"trainspan": _n_true(spans["is_call"])}
    for dialect, key in _DIALECTS:
        fits = pc.and_(left, pc.match_substring(spans["attributes"], f'"{key}":'))
        counts[dialect] = counts.get(dialect, 0) + _n_true(fits)
        left = pc.and_not(left, fits)
    counts["other"] = _n_true(left)
    return counts


def _untrainable(calls: pa.Table) -> dict[str, int]:
    """By the dataset's names of what a call's own span can show."""
    n_tokens, n_logprobs = pc.list_value_length(calls["completion_ids"]), pc.list_value_length(calls["logprobs"])
    attributes = calls["attributes"]
    left = pa.chunked_array([pa.array([True] * calls.num_rows, pa.bool_())])
    counts = {}
    for reason, lacking in (
        ("no_token_ids", pc.or_(pc.is_null(calls["prompt_ids"]), pc.is_null(calls["completion_ids"]))),
        ("no_logprobs", pc.not_equal(pc.fill_null(n_logprobs, -1), pc.fill_null(n_tokens, 0))),
        ("incomplete", pc.is_null(calls["finish_reason"])),
        ("not_delivered", pc.equal(pc.fill_null(calls["delivered"], True), False)),
        ("constrained", pc.match_substring(attributes, f'"{keys.SAMPLING_CONSTRAINED}":true')),
        ("attributes_dropped", pc.greater(calls["dropped_attributes"], 0)),
        ("redacted", pc.match_substring(attributes, f'"{keys.REDACTED}":')),
        ("untrusted", calls["untrusted"]),
    ):
        found = pc.and_(left, lacking)
        counts[reason] = _n_true(found)
        left = pc.and_not(left, lacking)
    return counts


def _n_true(mask: Any) -> int:
    return pc.sum(mask).as_py() or 0
