"""`manifest.json` of a dataset: what it was built from, what was kept and dropped, how calls were credited, and its files."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

__all__ = [
    "CreditRecord",
    "DatasetManifest",
    "Distribution",
    "InputRecord",
    "RewardCounts",
    "RewardStatistics",
    "RowFigures",
    "SplitTraces",
]

Counts = Mapping[str, int]


class RewardStatistics(TypedDict):
    """None if there are too few rewards; `std` with ddof 1."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    n: int


class Distribution(RewardStatistics):
    """Quantiles are values that occur; `counts` are those of the bins between `edges`."""

    p10: float | None
    p50: float | None
    p90: float | None
    edges: Sequence[float]
    counts: Sequence[int]


class SplitTraces(TypedDict):
    """The number of traces with spans in several stores, and some of them: `trace_id`, `stores`."""

    traces: int
    examples: Sequence[Mapping[str, Any]]


class CreditRecord(TypedDict):
    """How advantages were computed, with the defaults resolved."""

    credit: str
    baseline: str
    gamma: float
    rewards: Mapping[str, float]
    """Name → weight."""
    combine: str
    group_over: str
    step_by: str
    weights: Mapping[str, float]
    agents: Mapping[str, str]
    air: str | None


class InputRecord(TypedDict):
    """A store, and the last `seq` that was read."""

    store: str
    watermark: int


class RowFigures(TypedDict):
    """How calls became rows, of what sizes, and which policies sampled them."""

    merge_ratio: float | None
    """Share of the calls after the first of their agent that continue a segment."""
    segments: int
    merge_failures: Mapping[str, Any]
    """Cause → number of `calls`, and an `example`."""
    tokens: Counts
    policy: str | None
    bases: Counts
    min_policy_version: int | None
    max_policy_version: int | None


class RewardCounts(TypedDict):
    """What counted as a reward, and what did not."""

    rewards_late: int
    ignored_self_rewards: int
    labels: Counts
    """People's labels: on `rollouts` and `calls`, `calls_unused` (on calls, not counted), rollouts with `preferences`, which are no
    rewards, and labels `without_attempt`, which do not count."""
    rewards_unmatched: int
    responses_ambiguous: int
    ignored_values: int
    ignored_claims: Counts


class DatasetManifest(RowFigures, RewardCounts):
    """All fields, by name; counts by reason begin with the greatest."""

    version: int
    """DATASET_VERSION."""
    run_id: str | None
    """None also if there are several runs."""
    round: int
    rows: int
    rollouts: int
    groups: int
    rollouts_seen: int
    groups_seen: int
    calls_seen: int
    calls_kept: int
    coverage: float | None
    """Kept share of the calls that could be expected to be trainable."""
    dropped: Counts
    dropped_without_tokens: Counts
    dropped_rollouts: Counts
    rollouts_without_calls: int
    pending: Counts
    rewards: RewardStatistics
    groups_spread: Counts
    distributions: Mapping[str, Distribution]
    groups_incomplete: Counts
    split_traces: SplitTraces
    credit: CreditRecord
    settings: Mapping[str, Any]
    """Those that determine the rows."""
    functions: Mapping[str, str]
    """Function of the user → hash of its source."""
    trainspan: str
    """Version of the package."""
    inputs: Sequence[InputRecord]
    as_of_ns: int
    earlier: Mapping[str, Any]
    """The datasets that existed."""
    history: Counts | None
    files: Sequence[Mapping[str, Any]]
    """Name, sha256 and number of rows of each."""
    ledger: Mapping[str, str]
