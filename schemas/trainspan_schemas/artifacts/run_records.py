"""The records of a run of the loop, one a line of `rounds.jsonl`: of its rounds and of its evaluations.

They are typed as the JSON objects that stand there: the loop writes them (round_record.py, validation.py), and reads them again when
it resumes; `trainspan status`, reports and pages read them. Keys that are not required are absent where they do not apply.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from trainspan_schemas.intervals import EstimateRecord

__all__ = [
    "BestRecord",
    "CheckRecord",
    "DatasetFigures",
    "EvalName",
    "EvalRecord",
    "OutcomeFigures",
    "PolicyFigures",
    "RolloutFigures",
    "RoundRecord",
    "RunRecord",
    "ServedVersions",
    "evaluations_in",
    "rounds_in",
]

EvalName: TypeAlias = Literal["validation", "probe"]


class CheckRecord(TypedDict):
    """A condition of the integrity panel."""

    name: str
    ok: bool
    detail: str


class RolloutFigures(TypedDict, total=False):
    """Of the rollouts of a round: what `RunResult` says of them, or its part that is known of a batch or of live rewards."""

    run_id: str
    round: int
    split: str | None
    total: int
    groups: int
    status: Mapping[str, int]
    mean_reward: float | None
    rewarded: int
    calls: int
    seconds: float
    unacknowledged: int
    resumed: int
    unreported: int
    judge: Mapping[str, float]
    sampled_tokens: int | None
    sampling_seconds: float | None
    new_rewards: int


class DatasetFigures(TypedDict):
    """Of the dataset of a round, from its manifest; None where there is none."""

    rows: int | None
    rollouts: int | None
    groups: int | None
    calls_seen: int | None
    calls_kept: int | None
    dropped: Mapping[str, int] | None
    rewards: Mapping[str, Any] | None


class OutcomeFigures(TypedDict):
    """What a round did: to a policy, or to all of several."""

    policy_version: int | None
    """Afterwards; None if there are several policies."""
    skipped: str | None
    refused: NotRequired[str | None]
    trial: NotRequired[Mapping[str, Any] | None]
    """The verdict on its new version."""
    dataset: DatasetFigures
    train: Mapping[str, Any]
    """The trainer's `RoundTrained`; empty if nothing was trained, or if there are several policies."""


class PolicyFigures(OutcomeFigures):
    """What a round did to one of several policies."""

    seconds: Mapping[str, float]


class RoundRecord(OutcomeFigures):
    """A round."""

    kind: Literal["round"]
    round: int
    rollout: RolloutFigures
    policies: NotRequired[Mapping[str | None, PolicyFigures]]
    """Of each of several."""
    seconds: Mapping[str, float]
    """Stage → seconds; `total` is the time since the record before."""
    checks: Sequence[CheckRecord]


class ServedVersions(TypedDict):
    """The versions that answered an evaluation: of the only policy, or of each."""

    policy_version: int | None
    policies: NotRequired[Mapping[str | None, "ServedVersions"]]


class EvalRecord(EstimateRecord, ServedVersions):
    """An evaluation on held-out tasks."""

    kind: Literal["eval"]
    name: EvalName
    round: int
    tasks: int
    pass_at: NotRequired[Mapping[int, float]]
    status: Mapping[str, int]
    calls: int
    seconds: float
    began_ns: int
    """With `ended_ns`, by the loop's clock, the time in which its rollouts began."""
    ended_ns: int
    checks: list[CheckRecord]


class BestRecord(TypedDict):
    """The best validation, whose checkpoint is kept, in `run.json`."""

    checkpoint: str
    round: int
    policy_version: int | None
    n: int
    mean: float | None
    deviation: float | None
    binary: bool


RunRecord: TypeAlias = RoundRecord | EvalRecord


def rounds_in(records: Iterable[RunRecord]) -> list[RoundRecord]:
    """Those of rounds."""
    return [record for record in records if record["kind"] == "round"]


def evaluations_in(records: Iterable[RunRecord], name: EvalName | None = None) -> list[EvalRecord]:
    """Those of evaluations, of this name if one is given."""
    return [record for record in records if record["kind"] == "eval" and name in (None, record["name"])]
