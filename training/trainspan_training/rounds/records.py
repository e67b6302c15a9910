"""Assembles a round's record from its plan, its preparation, and the measurements of its steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainspan_schemas.artifacts.checkpoint import checkpoint_name
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.metrics.round_record import RoundRecord, summarize
from trainspan_training.metrics.signal import Signal, best_evidence, evidence
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.token_stats import StepStats, TokenSums
from trainspan_training.rounds.old_policy import Prepared, agreement_of
from trainspan_training.rounds.reading import Outline

__all__ = ["Trained"]


@dataclass(frozen=True, slots=True)
class Trained:
    """The state of a round after its steps."""

    dataset: DatasetFolder
    parent: Policy
    outline: Outline
    prepared: Prepared
    stats: Sequence[StepStats]
    """Statistics of the steps that ran."""
    kl: float
    """k3 against the old policy after the last step."""
    signals: Sequence[Signal]
    """The tests whether rewards depend on what was sampled, of the rounds before and of this one."""
    moved: float | None
    """The greatest movement between a version of the calls and the policy, if it is known."""
    unrecorded_tokens: int
    """Number of trained tokens, of all processes, without figures of their own."""
    failure: str | None
    """Why the round is discarded, if it is."""
    micro_batch_tokens: int
    trainer_dtype: str
    server_dtype: str | None
    seconds: dict[str, float]
    """Time by stage; later stages are added."""

    def record(self, settings: TrainSettings) -> RoundRecord:
        """The record, without alarms."""
        parent, outline, off = self.parent, self.outline, self.prepared.off_policy
        staleness, first = outline.staleness, self.stats[0].sums if self.stats else TokenSums()
        summary = summarize(outline.steps, self.stats, settings)
        return RoundRecord(
            round=self.dataset.round,
            version=parent.version if self.failure else parent.version + 1,
            checkpoint=parent.name if self.failure else checkpoint_name(parent.version + 1),
            dataset=self.dataset.sha256,
            error=self.failure,
            rows=outline.calls,
            reward_mean=_or_nan(self.dataset.reward_mean),
            reward_std=_or_nan(self.dataset.reward_std),
            groups=self.dataset.groups,
            zero_spread_groups=self.dataset.zero_spread_groups,
            kl=self.kl,
            signal_within=self.signals[-1].within,
            signal_between=self.signals[-1].between,
            signal_p=self.signals[-1].p,
            signal_z=evidence(self.signals),
            signal_best=best_evidence(self.signals),
            signal_rounds=sum(signal.tested for signal in self.signals),
            tokens_per_second=summary["forwarded_tokens"] / (self.seconds["train"] + self.seconds["optimizer"]),
            policy_versions=[*outline.versions[:1], *outline.versions[-1:]],
            staleness_mean=staleness.mean,
            staleness_max=staleness.greatest,
            stale_calls=staleness.dropped,
            constrained_calls=outline.constrained,
            unreplayed_calls=outline.unreplayed,
            unrecorded_tokens=self.unrecorded_tokens,
            old_policy=self.prepared.old_policy,
            micro_batch_tokens=self.micro_batch_tokens,
            effective_sample_share=off.effective_share,
            weight_max=off.max_weight if off.tokens else math.nan,
            bounded=off.bounded / off.tokens if off.tokens else 0.0,
            rejected_calls=off.rejected_calls / off.calls if off.calls else 0.0,
            agreement=agreement_of(first, self.trainer_dtype, self.server_dtype, settings, staleness, self.moved),
            seconds=self.seconds,
            **summary,
        )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
