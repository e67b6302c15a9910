"""One record per round: exact figures over its trained tokens, appended to `metrics.jsonl`."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainspan_schemas.artifacts.agreement import Agreement
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.files.durable import JsonObject, append_line, json_lines

if TYPE_CHECKING:
    from trainspan_training.data.steps import Step
    from trainspan_training.metrics.signal import Signal
    from trainspan_training.objective.token_stats import StepStats

__all__ = ["METRICS_FILE", "RoundRecord", "append_record", "has_record", "read_records", "signals", "summarize"]

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A line of `metrics.jsonl`. Figures of steps not reached, or not measured, are NaN (`null` in the file)."""

    round: int
    version: int
    checkpoint: str
    """Current checkpoint after the round: the new one or, after an error, the previous policy."""
    dataset: str
    """sha256 of the manifest."""
    error: str | None
    rows: int
    """Number of calls in the dataset."""
    sequences: int
    """Number of rows after merging."""
    rollouts: int
    steps: int
    """Optimizer steps that were made, in all passes."""
    planned_steps: int
    """Optimizer steps in all passes; `target_kl` or an error ends a round earlier."""
    reward_mean: float
    reward_std: float
    groups: int | None
    """Number of compared groups of the dataset's rollouts."""
    zero_spread_groups: int | None
    """Number of these with all rewards equal."""
    loss: float
    """Mean over the steps."""
    grad_norm: float
    """Mean over the steps, before clipping."""
    grad_norm_max: float
    learning_rate: float
    """Of the last step that was made."""
    kl: float
    """k3 against the old policy (that of the importance ratio) after the last step, on a sample of tokens; see `Prepared.unseen`."""
    signal_within: float
    """z of the test whether rewards depend on what was sampled, over pairs of rollouts of a group; see `signal`."""
    signal_between: float
    """The same over pairs of different groups."""
    signal_p: float
    """p of both; NaN if no group had different advantages."""
    signal_z: float
    """The evidence of all rounds so far, in standard deviations."""
    signal_best: float
    """The greatest evidence after any round so far: later rounds with few mixed groups take away none of it."""
    signal_rounds: int
    """Number of these rounds that could be tested."""
    k1: float
    """k1 against the sampling policy, as forwarded during the round: each token under its step's weights."""
    k3: float
    """k3 against the sampling policy, as forwarded."""
    k3_old: float
    """k3 against the old policy, as forwarded."""
    kl_reference: float
    """k3 against the model that the run started from; NaN if `kl_coef` is 0."""
    observation_tokens: int | None
    """Number of tokens of tool results and user turns in the loss, in all passes; None if `observation_weight` is 0."""
    unobserved_tokens: int | None
    """Number of tokens between calls that are not known to be the environment's; None if `observation_weight` is 0."""
    observation_loss: float
    """Mean −log π_θ of the observation tokens, as forwarded, in nats; NaN without any."""
    ratio_max: float
    """Greatest per-token importance ratio."""
    logp_diff_mean: float
    """|Δ log-probability| against the sampler at the first step, before any weight moved."""
    logp_diff_max: float
    logp_diff_k3: float
    """k3 of the same tokens."""
    clip_low: float
    """Share of trained tokens."""
    clip_high: float
    entropy: float
    """Mean over trained tokens that had an alternative, like all means over tokens; in nats."""
    trained_tokens: int
    forwarded_tokens: int
    """Number in forward and backward passes, without padding; includes those of a step that was only measured."""
    unique_tokens: int
    """Number in the steps' prefix trees: the minimum to forward."""
    tokens_by_step: dict[str, list[int]]
    """The three figures above for each step that was made, in all passes."""
    padding: float
    """Share of padding among the tokens that went through the model."""
    micro_batches: int
    """Number of forward and backward passes of the steps."""
    micro_batch_tokens: int
    """Greatest number of tokens in one, as set or as fitted to free memory."""
    rows_per_rollout: float
    tokens_per_second: float
    """Forwarded tokens per second of the steps."""
    policy_versions: list[int]
    """Smallest and greatest version among the calls."""
    staleness_mean: float
    """Mean number of versions that the calls are behind, over trained tokens."""
    staleness_max: int
    stale_calls: int
    """Number of calls beyond `max_staleness`, or of unknown version if that is set, which were not trained."""
    constrained_calls: int
    """Number of calls trained under the masks or biases they were sampled under."""
    unreplayed_calls: dict[str, int]
    """Number of constrained calls that were not trained, by reason."""
    unrecorded_tokens: int
    """Number of trained tokens beyond `token_figures_mib`, without figures of their own."""
    old_policy: str
    """`logged` or `recompute`: the log-probabilities that the importance ratio was taken against."""
    effective_sample_share: float
    """(Σw)²/(N Σw²) over tokens, w = π_old/π_sampler; 1 if nothing was recomputed."""
    weight_max: float
    """Greatest w; NaN if nothing was recomputed."""
    bounded: float
    """Share of trained tokens with w cut to the cap, or masked."""
    rejected_calls: float
    """Share of calls rejected by `reject_ratio`."""
    agreement: Agreement
    """Agreement of server and trainer at the first step."""
    alarms: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def engine_mismatch(self) -> bool:
        """Whether server and trainer disagree though they should hold the same weights."""
        return self.agreement.mismatch

    @property
    def clip_fraction(self) -> float:
        return self.clip_low + self.clip_high


def summarize(steps: "Sequence[Step]", stats: "Sequence[StepStats]", settings: TrainSettings) -> dict[str, Any]:
    """The fields derived from the plan (of all processes) and the measurements, over the steps that were made, in all passes.

    What was forwarded includes the step that was only measured.
    """
    from trainspan_training.objective.token_stats import TokenSums

    first = stats[0].sums if stats else TokenSums()
    ran = [steps[index % len(steps)] for index in range(len(stats))]
    is_made = [step.rate > 0 for step in stats]  # the step that finds `target_kl` reached is only measured
    made, stats = [*compress(ran, is_made)], [*compress(stats, is_made)]
    first_pass = made[: len(steps)]
    total = sum((step.sums for step in stats), TokenSums())
    count = len(stats) or math.nan
    forwarded, padded = sum(step.forwarded for step in ran), sum(step.padded for step in ran)
    return {
        "sequences": sum(step.rows for step in first_pass),
        "rollouts": sum(step.rollouts for step in first_pass),
        "steps": len(made),
        "planned_steps": len(steps) * settings.passes,
        "loss": sum(step.loss for step in stats) / count,
        "grad_norm": sum(step.grad_norm for step in stats) / count,
        "grad_norm_max": max((step.grad_norm for step in stats), default=math.nan),
        "learning_rate": stats[-1].rate if stats else math.nan,
        "k1": total.mean("k1"),
        "k3": total.mean("k3"),
        "k3_old": total.mean("k3_old"),
        "kl_reference": total.mean("k3_reference") if settings.kl_coef else math.nan,
        "observation_tokens": int(total.observations) if settings.observation_weight else None,
        "unobserved_tokens": sum(step.unobserved for step in made) if settings.observation_weight else None,
        "observation_loss": total.observation_nats / total.observations if total.observations else math.nan,
        "ratio_max": total.max_ratio if stats else math.nan,
        "logp_diff_mean": first.mean("abs_diff"),
        "logp_diff_max": first.max_abs_diff if stats else math.nan,
        "logp_diff_k3": first.mean("k3"),
        "clip_low": total.mean("clipped_low"),
        "clip_high": total.mean("clipped_high"),
        "entropy": total.mean("entropy"),
        "trained_tokens": sum(step.trained for step in made),
        "forwarded_tokens": forwarded,
        "unique_tokens": sum(step.unique for step in ran),
        "tokens_by_step": {name: [getattr(step, name) for step in made] for name in ("trained", "forwarded", "unique")},
        "micro_batches": sum(len(step.cuts) for step in ran),
        "padding": 1 - forwarded / padded if padded else math.nan,
        "rows_per_rollout": sum(s.rows for s in ran) / sum(s.rollouts for s in ran) if ran else math.nan,
    }


def append_record(checkpoints: Path, record: RoundRecord) -> None:
    """Appends the record's line. Raises OSError."""
    append_line(checkpoints / METRICS_FILE, json.dumps(finite(asdict(record))))


def read_records(checkpoints: Path) -> list[JsonObject]:
    """All records, skipping a line torn by a kill or a full disk."""
    return json_lines(checkpoints / METRICS_FILE)


def signals(checkpoints: Path, before: int) -> "list[Signal]":
    """The tests for a signal in the rounds before a round, without those that failed."""
    from trainspan_training.metrics.signal import Signal

    fields = ("signal_within", "signal_between", "signal_p")
    known = (line for line in read_records(checkpoints) if line["round"] < before and not line.get("error"))
    lines = [line for line in known if line.get("signal_p") is not None]
    return [Signal(*(float(line[name]) for name in fields)) for line in lines]


def has_record(checkpoints: Path, name: str) -> bool:
    """Whether there is a record of the round that made this checkpoint."""
    return any(line.get("checkpoint") == name and not line.get("error") for line in read_records(checkpoints))


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, with None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
