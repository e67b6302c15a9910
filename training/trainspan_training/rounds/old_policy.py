"""Preparation before a round's first step: staleness of its calls, and log-probabilities under other policies."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from trainspan_schemas.artifacts.agreement import Agreement, is_exact, limit_of
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import DatasetError
from trainspan_training.data.dataset import Call, DatasetFolder
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.data.steps import Step
from trainspan_training.devices.team import Team
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer
from trainspan_training.objective.off_policy import Correction, OffPolicySums, correct
from trainspan_training.objective.token_stats import TokenSums

__all__ = [
    "Prepared",
    "Staleness",
    "against_old",
    "agreement_of",
    "check_policy",
    "sample_of",
    "staleness_of",
    "with_reference",
]

log = logging.getLogger(__name__)

_SAMPLE_TOKENS = (1024, 2048, 4096)
"""Numbers of padded tokens on which a divergence is measured outside of the steps: the first with enough trained tokens."""
_SAMPLE_TRAINED = 512


@dataclass(frozen=True, slots=True)
class Staleness:
    """How many updates are between the versions that sampled a dataset's calls and the policy."""

    mean: float
    """Mean over sampled tokens."""
    greatest: int
    dropped: int
    """Number of calls beyond the limit."""
    fresh: bool
    """Whether all calls are of the current version."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The steps of one process, ready for training."""

    steps: tuple[Step, ...]
    old_policy: str
    """`logged` or `recompute`."""
    off_policy: OffPolicySums
    """Sums over all processes; zeros if nothing was recomputed."""
    sample: tuple[tuple[MicroBatch, ...], ...]
    """Tokens of this process, a part of each of the last steps from the last one on: `old` is the policy at the round's start."""

    def unseen(self, made: int) -> tuple[MicroBatch, ...]:
        """The sample's steps after the first `made`, or the last one if there are none.

        On the tokens that moved it a policy seems far away, and most on those of steps that others followed.
        """
        steps = self.sample[: max(1, len(self.steps) - made)]
        return tuple(chain.from_iterable(steps))


def check_policy(dataset: DatasetFolder, policy: Policy) -> None:
    """Raises DatasetError if the dataset has calls of a policy or base model other than the checkpoint's.

    Logs a warning if the base model cannot be verified.
    """
    if dataset.policy and policy.trained_on and dataset.policy != policy.trained_on:
        raise DatasetError(
            f"{dataset.path} has calls of policy {dataset.policy!r}, but {policy.name} was trained on those of "
            f"{policy.trained_on!r}: build it with --policies {policy.trained_on}, or give each policy its own --checkpoints"
        )
    if policy.base_digest is None or not dataset.bases:
        who = "the dataset" if policy.base_digest else policy.name
        log.warning("dataset=%s base model not verified: %s does not name one", dataset.path.name, who)
        return
    if foreign := [base for base in dataset.bases if base != policy.base_digest]:
        raise DatasetError(
            f"{dataset.path} has calls of base model {foreign[0][:12]}…, but {policy.name} was trained from "
            f"{policy.base} ({policy.base_digest[:12]}…): set --model to the served model, with separate --checkpoints"
        )


def staleness_of(calls: Sequence[Call], behind: Callable[[int], int], dropped: int) -> Staleness:
    """Staleness of the calls: `behind` gives the number of updates between a version and the policy.

    Calls of unknown version count as current.

    A call that went on across a swap counts token by token in the mean, and by its most distant tokens in the greatest.
    """
    versions = [(version, count) for call in calls for version, count in call.tokens_by_version()]
    ages = [(0 if version is None else behind(version), count) for version, count in versions]
    tokens = sum(count for _, count in ages)
    return Staleness(
        mean=sum(age * count for age, count in ages) / tokens if tokens else 0.0,
        greatest=max((age for age, _ in ages), default=0),
        dropped=dropped,
        fresh=bool(versions) and all(version is not None and behind(version) == 0 for version, _ in versions),
    )


def against_old(
    trainer: TransitionGRPOTrainer,
    steps: Sequence[Step],
    settings: TrainSettings,
    staleness: Staleness,
    server_dtype: str | None,
) -> Prepared:
    """The steps with their importance ratio against the policy chosen by the settings.

    By default the logged log-probabilities are used if all calls are of the current version, both sides compute in
    float32 (`server_dtype` is None if the server did not answer), and they agree on a sample of the calls; otherwise
    those of the current weights are recomputed. In bfloat16 the logged ratio would start at the noise between the two,
    and be clipped by it.
    """
    logged = settings.old_policy == "logged"
    if settings.old_policy is None and staleness.fresh and is_exact(server_dtype, trainer.dtype):
        measured = trainer.scorer.measure(*chain.from_iterable(sample_of(steps, trainer.team)))
        logged = not agreement_of(measured, trainer.dtype, server_dtype, settings, staleness).mismatch
    if logged:
        # The distance of the samplers, by their age or their engine, is no movement of these steps.
        sample = tuple(
            tuple(replace(batch, old=trainer.scorer.logprobs(batch)) for batch in batches)
            for batches in sample_of(steps, trainer.team)
        )
        return Prepared(tuple(steps), "logged", OffPolicySums(), sample)
    correction = Correction.of(settings)
    corrected, total = [], OffPolicySums()
    for step in steps:
        batches = []
        for batch in step.micro_batches:
            changed, sums = correct(batch, trainer.scorer.logprobs(batch), correction)
            batches.append(changed)
            total += sums
        corrected.append(replace(step, micro_batches=tuple(batches)))
    sums = sum(trainer.team.gather(total), OffPolicySums())
    return Prepared(tuple(corrected), "recompute", sums, sample_of(corrected, trainer.team))


def agreement_of(
    sums: TokenSums,
    dtype: str,
    server_dtype: str | None,
    settings: TrainSettings,
    staleness: Staleness,
    moved: float | None = None,
) -> Agreement:
    """Agreement of server and trainer on tokens, from sums measured under the round's starting weights.

    `moved` is the greatest movement between a version of the calls and the policy, if it is known.
    """
    limit = limit_of(server_dtype, dtype, settings.engine_mismatch)
    return Agreement(sums.mean("abs_diff"), sums.mean("k3"), limit, staleness.fresh, server_dtype, dtype, moved)


def with_reference(trainer: TransitionGRPOTrainer, steps: Sequence[Step], reference: Any) -> list[Step]:
    """The steps with log-probabilities of the `reference` model; None means the policy without its adapter."""

    def scored(batch: MicroBatch) -> MicroBatch:
        if reference is not None:
            return replace(batch, reference=trainer.scorer.logprobs(batch, reference))
        with trainer.policy.disable_adapter():
            return replace(batch, reference=trainer.scorer.logprobs(batch))

    return [replace(step, micro_batches=tuple(scored(batch) for batch in step.micro_batches)) for step in steps]


def sample_of(steps: Sequence[Step], team: Team) -> tuple[tuple[MicroBatch, ...], ...]:
    """Rows or trees of each of the last steps, from the last one on.

    As many as have 512 trained tokens in the mean over the processes, or 4,096 tokens in one of them, however they are
    divided into micro-batches. All processes take the same number, so that each makes as many forward passes. Of a few dozen
    tokens k3 would be chance: a single one can be a third of it.
    """
    found: list[list[MicroBatch]] = []
    trained = tokens = 0.0
    for step in reversed(steps):
        found.append([])
        for batch in _by_size(step.micro_batches):
            part = _part_of(batch)
            counts = team.gather((len(part.targets), part.tokens.size))
            largest = max(size for _, size in counts)
            if largest > _SAMPLE_TOKENS[-1] and found[-1]:
                break  # a long tree, of which no part can be taken
            found[-1].append(part)
            trained += sum(targets for targets, _ in counts) / team.size
            tokens += largest
            if trained >= _SAMPLE_TRAINED or tokens >= _SAMPLE_TOKENS[-1]:
                return tuple(map(tuple, found))
    return tuple(map(tuple, found))


def _by_size(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The largest first; those whose first tree alone is beyond 4,096 tokens last, the smallest such tree first."""
    most = _SAMPLE_TOKENS[-1]
    firsts = [(batch.first(most).tokens.size, batch) for batch in batches]
    ordered = sorted(firsts, key=lambda pair: (pair[0], 0) if pair[0] > most else (0, -pair[1].tokens.size))
    return [batch for _, batch in ordered]


def _part_of(batch: MicroBatch) -> MicroBatch:
    """The first rows or trees of a micro-batch."""
    parts = (batch.first(tokens) for tokens in _SAMPLE_TOKENS)
    return next((part for part in parts if len(part.targets) >= _SAMPLE_TRAINED), batch.first(_SAMPLE_TOKENS[-1]))
