"""The counts of a dataset's parts become those of the dataset."""

from collections import Counter

import polars as pl

from trainspan_processing.assembly.rows import RowCounts, add_counts
from trainspan_processing.merging.merge_failures import MergeFailures


def _counts(number: int, *versions: int) -> RowCounts:
    """Counts of one part, all different."""
    return RowCounts(
        *range(number, number + 6),
        versions=list(versions),
        policies=Counter({"policy": number, f"p{number}": 1}),
        bases=Counter({"base": number}),
        groups={f"g{number}", "shared"},
        merge_failures=MergeFailures({"fork": number}, {"fork": {"at": number}}),
        shapes=[pl.DataFrame({"prompt_tokens": [number]})],
        calls_per_rollout=[pl.Series([number])],
    )


def test_each_count_of_a_later_part_is_added() -> None:
    counts = RowCounts()
    for part in (_counts(100, 9, 2), _counts(200, 3, 2, 10)):
        add_counts(counts, part)
    added = [counts.rows, counts.segments, counts.first_calls]
    added += [counts.prompt_tokens, counts.environment_tokens, counts.completion_tokens]
    assert added == [300, 302, 304, 306, 308, 310]
    assert counts.versions == [2, 3, 9, 10]
    assert counts.policies == {"policy": 300, "p100": 1, "p200": 1}
    assert counts.bases == {"base": 300}
    assert counts.groups == {"g100", "g200", "shared"}
    assert counts.merge_failures == MergeFailures({"fork": 300}, {"fork": {"at": 100}})
    assert [frame["prompt_tokens"].to_list() for frame in counts.shapes] == [[100], [200]]
    assert [series.to_list() for series in counts.calls_per_rollout] == [[100], [200]]
