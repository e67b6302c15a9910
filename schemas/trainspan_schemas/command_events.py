"""What commands tell programs: exit codes, and under `--format json` one JSON object a line, whose key `event` names its type.

The command prints `event_line(event)`, and its reader gets the same value back from `parse`.
Other exit codes are 0 (done), 1 (failed) and 2 (wrong usage).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

from trainspan_schemas.artifacts.gate_result import GateResult
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.identity import Split

__all__ = [
    "NOTHING_TO_TRAIN",
    "REPEATED",
    "STAGES",
    "UNFINISHED",
    "BranchesMeasured",
    "DatasetBuilt",
    "Event",
    "FineTuneEvaluated",
    "FineTuneStarted",
    "FineTuneStep",
    "FineTuned",
    "GateResult",
    "NoDataset",
    "Progress",
    "Ready",
    "RoundTrained",
    "RunResult",
    "TrainingProgress",
    "event_line",
    "parse",
]

NOTHING_TO_TRAIN: Final = 3
"""Exit code of `trainspan dataset`: no call can be trained; of `trainspan branch`: no call can be branched from."""
UNFINISHED: Final = 75
"""Exit code of `trainspan rollout`: the same command with `--resume` continues (`EX_TEMPFAIL` of sysexits.h)."""
REPEATED: Final = frozenset({"infra_error", "cancelled"})
"""Final statuses of rollouts that a resumed run repeats."""
STAGES: Final = {
    "replay": "replaying the constraints of answers",
    "read": "reading the dataset",
    "plan": "planning the steps",
    "canary": "scoring the canary",
    "old": "getting the log-probabilities of the old policy",
    "state": "waiting until the last round's optimizer state is saved",
    "signal": "testing whether rewards carry a signal",
    "check": "measuring how far the policy moved",
    "save": "saving the policy",
    "swap": "swapping in the policy",
}
"""Stage of a trainer's round, as in the `seconds` of metrics.jsonl → what it does. The steps are between `state` and `signal`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A service is ready: `serve` with its URL and version, `weights` with its URL, `train` with device and dtype."""

    url: str | None = None
    version: int | None = None
    device: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of `trainspan rollout`."""

    done: int
    failed: int
    """Done with a status other than `ok`."""
    total: int
    """So far, if tasks arrive on standard input."""
    mean_reward: float | None = None
    groups: int = 0
    """Tasks of which all rollouts are done."""
    oldest_round: int | None = None
    """The first round with a task of which some are not done; None if there is none."""
    status: dict[str, int] = field(default_factory=dict)
    """Final status → rollouts."""
    rewarded: int = 0
    """Rollouts with a reward."""
    calls: int = 0
    """Model calls of all attempts: successful ones as reported by the agents, at most those that the policy servers began."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of `trainspan rollout`."""

    run_id: str
    round: int
    split: Split | None
    total: int
    status: dict[str, int]
    """Final status → rollouts."""
    mean_reward: float | None
    """Over the rollouts with a reward."""
    rewarded: int
    calls: int
    """Model calls of all attempts: successful ones as reported by the agents, at most those that the policy servers began."""
    seconds: float
    unacknowledged: int
    """Rollouts with a verdict that the collector has not acknowledged; resume the run to send them."""
    resumed: int = 0
    """Rollouts that an earlier process of the run had finished, included in the total."""
    unreported: int = 0
    """Attempts whose agents ended before they could report their calls: `calls` has those that the policy servers began."""
    judge: Mapping[str, float] = field(default_factory=dict)
    """What the judge counted: of a judge model, its `requests`, answers that were `cached`, `prompt_tokens` and `completion_tokens`.

    Of one that compares also the groups that it saw in `both_orders`, with their `position_bias`: the score of an attempt that stands
    earlier, minus its score where it stands later, of 1, with its standard error, `position_bias_error`, of two groups or more."""

    @property
    def unfinished(self) -> int:
        """Rollouts and verdicts that the same command with `resume` repeats or sends."""
        return self.unacknowledged + sum(self.status.get(status, 0) for status in REPEATED)


@dataclass(frozen=True, slots=True)
class BranchesMeasured:
    """`trainspan branch` ran branches and measured values with them."""

    run: Mapping[str, Any]
    """The `RunResult` of the branches."""
    rollouts: list[Mapping[str, Any]]
    """Those branched from, with the values and advantages of their calls."""
    states: int
    """States that branches began at."""
    skipped_states: Mapping[str, int]
    """Reason → states that branches cannot begin at."""
    skipped: Mapping[str, int]
    """Reason → rollouts that were not branched from."""
    diverged: float
    """Share of the branches that did not follow their rollout."""
    unmeasured: int
    """States without a value, because branches ended without a reward."""
    unrewarded: int
    """Branches that ended without a reward: ok, or by a failure that may be the policy's doing."""
    of_other_policies: int
    """Rollouts whose branches another policy version sampled."""
    sampled_tokens: int
    """By the server, for the branches; repeated answers cost none."""


@dataclass(frozen=True, slots=True)
class DatasetBuilt:
    """`trainspan dataset` built a dataset."""

    path: str
    """Folder or URL."""
    sha256: str
    """Of the manifest."""
    manifest: Mapping[str, Any]
    rows_url: str | None = None
    """Of the rows, if the dataset is under a URL."""


@dataclass(frozen=True, slots=True)
class NoDataset:
    """`trainspan dataset` built none, for one of two reasons."""

    nothing_to_train: str | None = None
    """Why no call can be trained."""
    store_error: str | None = None
    """Why a store could not be read."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Those that the manifest would have had."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """A trainer begins another stage of a round, begins its steps, or has made one."""

    round: int
    stage: str | None = None
    """One of STAGES; None from the beginning of the steps to the last one."""
    step: int = 0
    """Number of steps that are made, over all passes."""
    steps: int = 0
    """Planned; `target_kl` may end the round earlier."""
    forwarded_tokens: int = 0
    """Of the last step."""
    seconds: float = 0.0
    """Of the last step."""

    def __str__(self) -> str:
        if self.stage is not None:
            return STAGES[self.stage]
        return _pace(self) if self.step else f"step 1 of {self.steps}"


@dataclass(frozen=True, slots=True)
class RoundTrained:
    """A trainer is done with a dataset; figures that were not measured are None. `metrics.jsonl` has all of them."""

    round: int
    version: int | None
    """Of the newest good policy afterwards."""
    checkpoint: str | None = None
    """Its checkpoint; None if it is still the starting model."""
    rows: int | None = None
    rollouts: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    kl: float | None = None
    logp_diff_max: float | None = None
    logp_diff_mean: float | None = None
    logp_diff_k3: float | None = None
    entropy: float | None = None
    reward_mean: float | None = None
    learning_rate: float | None = None
    staleness_mean: float | None = None
    signal_z: float | None = None
    signal_best: float | None = None
    signal_rounds: int | None = None
    clip_low: float | None = None
    """Share of trained tokens."""
    clip_high: float | None = None
    trained_tokens: int | None = None
    forwarded_tokens: int | None = None
    micro_batches: int | None = None
    micro_batch_tokens: int | None = None
    """Greatest number of tokens in one."""
    agreement: Mapping[str, Any] | None = None
    """Of server and trainer (artifacts/agreement.py); None if it was not measured."""
    alarms: list[str] = field(default_factory=list)
    """Names of the alarms that the round raised (docs/training.md)."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Stage → seconds."""
    swap: Mapping[str, Any] | None = None
    """The policy server's answer, or its key `error`; None if publishing is off."""
    skipped: str | None = None
    """Why nothing was trained."""
    error: str | None = None
    """What went wrong, in which case the previous policy stays."""
    withdrawn: bool = False
    """Whether an earlier version was put back in service in its place."""
    recovered: bool = False
    """Whether a process was killed before it could say this: the loop takes the figures from the trainer's files, if they are there."""

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, Any], **more: Any) -> "RoundTrained":
        """From a line of `metrics.jsonl`; `more` replaces its fields."""
        return cls(**{**{name: value for name, value in metrics.items() if name in cls.__slots__}, **more})


@dataclass(frozen=True, slots=True)
class FineTuneStarted:
    """`trainspan sft` begins to train, or continues."""

    device: str
    dtype: str
    examples: int
    answers: int
    """Trained or held out."""
    rows: int
    """Answers that continue one another share a row."""
    held_out_rows: int
    tokens: int
    """In an epoch."""
    trained_tokens: int
    """In the loss of an epoch."""
    rewritten: int
    """Answers whose prompt does not begin with the tokens of the previous answer, though its messages do."""
    dropped: Mapping[str, int]
    """Reason → answers."""
    named: Mapping[str, list[str]]
    """Reason, or `rewritten` → the first examples that it applies to."""
    learning_rate: float
    """At its peak."""
    gradient_accumulation_steps: int
    step: int = 0
    """After which it continues."""
    steps: int = 0
    """Of the whole job."""
    losses: list[str] = field(default_factory=list)
    """What the model cannot learn from the rows, in words: a kind of answers that are all dropped, tools that no prompt has."""
    completed_tools: int = 0
    """Examples whose tools lacked what the policy server rendered of them, such as `strict`."""
    compared: int = 0
    """Stored prompts of the same agent, compared with those that this training makes of the same messages."""
    differing: int = 0
    example: str = ""
    """The first that differs, and where."""
    without_strict: int = 0
    """Examples whose tools may lack `strict`, which the chat template would show."""


@dataclass(frozen=True, slots=True)
class FineTuneStep:
    """`trainspan sft` has made an optimizer step."""

    step: int
    """From 1."""
    steps: int
    epoch: float
    """Passes over the conversations so far."""
    loss: float
    """Mean −log π over the trained tokens of the step, in nats."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    entropy: float
    """Mean over the same tokens, in nats."""
    forwarded_tokens: int
    seconds: float

    def __str__(self) -> str:
        return _pace(self)


@dataclass(frozen=True, slots=True)
class FineTuneEvaluated:
    """`trainspan sft` has measured the conversations that are held out."""

    step: int
    """After which it was measured."""
    steps: int
    epoch: float
    eval_loss: float
    """Mean −log π over their trained tokens, in nats."""
    seconds: float


@dataclass(frozen=True, slots=True)
class FineTuned:
    """`trainspan sft` is done."""

    out: str
    """The model's folder."""
    was_there: bool
    """Whether it was complete before."""
    version: int | None
    """Its number among the checkpoints of `--checkpoints`; None without that option."""
    manifest: Mapping[str, Any]


def _pace(step: TrainingProgress | FineTuneStep) -> str:
    rate, left_s = step.forwarded_tokens / max(step.seconds, 1e-6), (step.steps - step.step) * step.seconds
    return f"step {step.step} of {step.steps}, {rate:.0f} tokens/s, about {left_s:.0f} s left"


Event: TypeAlias = (
    Ready
    | Progress
    | RunResult
    | BranchesMeasured
    | DatasetBuilt
    | NoDataset
    | TrainingProgress
    | RoundTrained
    | FineTuneStarted
    | FineTuneStep
    | FineTuneEvaluated
    | FineTuned
    | GateResult
)

_NAMES: Final[dict[type[Event], str]] = {
    Ready: "ready",
    Progress: "progress",
    RunResult: "result",
    BranchesMeasured: "branches",
    DatasetBuilt: "dataset",
    NoDataset: "no_dataset",
    TrainingProgress: "round_progress",
    RoundTrained: "round",
    FineTuneStarted: "start",
    FineTuneStep: "step",
    FineTuneEvaluated: "evaluation",
    FineTuned: "done",
    GateResult: "gate",
}
_TYPES: Final = {name: type_ for type_, name in _NAMES.items()}
_SPREAD: Final[dict[type[Event], str]] = {
    BranchesMeasured: "run",
    DatasetBuilt: "manifest",
    NoDataset: "figures",
    FineTuned: "manifest",
}
"""Type → its field whose entries stand beside the other fields in the line."""


def event_line(event: Event) -> str:
    """The event in one line, without its end."""
    values = asdict(event)
    more = values.pop(_SPREAD.get(type(event), ""), {})
    return json.dumps({"event": _NAMES[type(event)], **more, **values})


def parse(text: str) -> Event | None:
    """The event in a line; None if it is something else. Raises InvalidRecordError if its fields are not the type's."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = values.pop("event", None) if isinstance(values, dict) else None
    type_ = _TYPES.get(name) if isinstance(name, str) else None
    if type_ is None:
        return None
    if (spread := _SPREAD.get(type_)) is not None:
        fields = {name: values.pop(name) for name in type_.__slots__ if name in values}
        values = {**fields, spread: values}
    try:
        return type_(**values)
    except TypeError as error:
        raise InvalidRecordError(f"a line with the event {_NAMES[type_]} has other fields: {error}") from error
