"""The share of calls that are trained, of those that could be."""

from collections.abc import Sequence

import polars as pl
import pytest

from trainspan_processing.reasons.coverage import measure_coverage
from trainspan_processing.reasons.reason_counts import REASON_COUNTS

LATE = pl.DataFrame(schema={"late": pl.UInt32})


@pytest.mark.parametrize(
    ("pending", "expected"),
    [
        ([], 6 / 10),  # 2 redacted and 2 unfinished calls are lost; what is expected to be left out is not
        (["b"], 6 / 8),  # the 2 unfinished ones may still come, and only these are given back
        (["a", "b"], 6 / 6),
    ],
)
def test_calls_that_may_still_come_are_not_lost_and_expected_reasons_count_on_neither_side(
    pending: Sequence[str], expected: float
) -> None:
    rows = [("a", None, 6), ("a", "redacted", 2), ("a", "forced", 4), ("b", "unfinished", 2), ("b", "internal", 3)]
    counts = pl.DataFrame([(name, 0, *rest, 0) for name, *rest in rows], schema=REASON_COUNTS, orient="row")
    lines = pl.DataFrame(
        {"rollout_id": ["a", "b"], "attempt": [0, 0], "kept": [6, 0], "reason": [None, "unfinished"]},
        schema={"rollout_id": pl.String, "attempt": pl.Int32, "kept": pl.UInt32, "reason": pl.String},
    ).with_columns(pl.col("rollout_id").is_in(list(pending)).alias("pending"))
    coverage = measure_coverage(counts, counts.clear(), lines, LATE)
    assert (coverage.seen, coverage.kept, coverage.coverage) == (17, 6, pytest.approx(expected))
