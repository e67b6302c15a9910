"""What a round needs before its first step: rows within the model's limits, steps, and the log-probabilities of other policies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainspan_schemas.agreement import Agreement, is_exact, limit_of
from trainspan_schemas.errors import DatasetError, TrainingError
from trainspan_schemas.settings import TrainSettings

from .batches import MicroBatch
from .forwarding import Forwarding
from .loss_weights import Rule
from .offpolicy import Correction, OffPolicySums, correct
from .plan import Step, plan_steps
from .policy import Policy
from .rows import Row, make_rows
from .stats import TokenSums
from .trainer import TransitionGRPOTrainer
from .transitions import Call, DatasetFolder

__all__ = [
    "CHECK_TOKENS",
    "Prepared",
    "Staleness",
    "against_old",
    "agreement_of",
    "check_policy",
    "plan_round",
    "staleness_of",
log = logging.getLogger(__name__)

    "with_reference",
]

CHECK_TOKENS = 4096
"""Padded tokens on which a divergence is measured beside the steps."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """How far behind the calls of a dataset are, in policy versions."""

    mean: float
    """Over sampled tokens."""
    greatest: int
    dropped: int
    """Calls beyond the limit."""
    fresh: bool
    """Whether all calls are of the current version."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The steps of one process, ready to be trained."""

    steps: tuple[Step, ...]
    old_policy: str
    """`logged` or `recompute`."""
    off_policy: OffPolicySums
    """Over all processes; zeros where nothing was recomputed."""


def check_policy(dataset: DatasetFolder, policy: Policy) -> None:
    """Raises DatasetError if the dataset has calls of another policy than those that made the checkpoint, or of another base
    model. That it names no base model is a warning.
    """
    if dataset.policy and policy.trained_on and dataset.policy != policy.trained_on:
        raise DatasetError(
    if policy.base_digest is None or not dataset.bases:
        who = "the dataset" if policy.base_digest else policy.name
        log.warning("dataset=%s base model not verified: %s does not name one", dataset.path.name, who)
        return
    if foreign := [base for base in dataset.bases if base != policy.base_digest]:
        raise DatasetError(
            f"{dataset.path} has calls of base model {foreign[0][:12]}…, and {policy.name} was trained from "
            f"{policy.base} ({policy.base_digest[:12]}…): give --model the model that was served, and it --checkpoints of its own"
        )
            f"{dataset.path} has calls of policy {dataset.policy!r}, and {policy.name} was trained on those of "
            f"{policy.trained_on!r}: build it with --policies {policy.trained_on}, or give each policy its own --checkpoints"
        )


def staleness_of(calls: Sequence[Call], version: int, dropped: int) -> Staleness:
    """How far the calls are behind `version`; those of unknown version count as current."""
    behind = [max(0, version - (version if call.policy_version is None else call.policy_version)) for call in calls]
    tokens = sum(len(call.completion_ids) for call in calls)
    aged = sum(len(call.completion_ids) * age for call, age in zip(calls, behind, strict=True))
    return Staleness(
        mean=aged / tokens if tokens else 0.0,
        greatest=max(behind, default=0),
        dropped=dropped,
        fresh={call.policy_version for call in calls} == {version},
    )


def plan_round(
    calls: Sequence[Call],
    dataset: DatasetFolder,
    settings: TrainSettings,
    config: Any,
    forwarding: Forwarding,
    rule: Rule,
) -> tuple[list[Row], list[Step]]:
    """Rows and steps; `config` is the model's.

    Raises DatasetError for tokens that the model cannot take, TrainingError for rows that memory has no room for.
    """
    rows = make_rows(calls, merge=settings.merge)
    vocabulary, context = int(config.vocab_size), context_of(config)
    for row in rows:
        if len(row.tokens) > context:
            raise DatasetError(
                f"rollout {row.rollout} has a sequence of {len(row.tokens)} tokens, above the model's {context}: "
                "set [dataset] max_tokens"
            )
        if len(row.tokens) > forwarding.longest:
            raise TrainingError(
                f"rollout {row.rollout} has a sequence of {len(row.tokens)} tokens, memory has room for "
                f"{forwarding.longest}: set [dataset] max_tokens, train.gradient_checkpointing = true or "
                'train.adapter = "lora"'
            )
        if int(row.tokens.max()) >= vocabulary or int(row.tokens.min()) < 0:
            raise DatasetError(
                f"rollout {row.rollout} has token ids outside the model's vocabulary of {vocabulary}: "
                "it was sampled from another model"
            )
    rng = np.random.default_rng([settings.seed, int(dataset.sha256[:16], 16)])
    steps = plan_steps(rows, calls, steps=settings.steps_per_round, rule=rule, forwarding=forwarding, rng=rng)
    return rows, steps


def context_of(config: Any) -> int:
    """Greatest length of a sequence in tokens, of a text model's configuration."""
    return int(getattr(config, "max_position_embeddings", None) or 2**31)


def against_old(
    trainer: TransitionGRPOTrainer,
    steps: Sequence[Step],
    settings: TrainSettings,
    staleness: Staleness,
    server_dtype: str | None,
) -> Prepared:
    """The steps with their importance ratio against the policy that the settings ask for.

    By default the logged one if all calls are of the current version, both sides compute in float32 (`server_dtype` is
    None if the server could not be asked), and a sample of the calls shows that they agree; else the current weights',
    recomputed. In bfloat16 the logged ratio would begin at the noise between the two, and clip by it.
    """
    logged = settings.old_policy == "logged"
    if settings.old_policy is None and staleness.fresh and is_exact(server_dtype, trainer.dtype):
        sample = trainer.measure(largest(steps[0]).first(CHECK_TOKENS))
        logged = not agreement_of(sample, trainer.dtype, server_dtype, settings, staleness).mismatch
    if logged:
        return Prepared(tuple(steps), "logged", OffPolicySums())
    correction = Correction.of(settings)
    corrected, total = [], OffPolicySums()
    for step in steps:
        batches = []
        for batch in step.micro_batches:
            changed, sums = correct(batch, trainer.logprobs(batch), correction)
            batches.append(changed)
            total += sums
        corrected.append(replace(step, micro_batches=tuple(batches)))
    return Prepared(tuple(corrected), "recompute", sum(trainer.team.gather(total), OffPolicySums()))


def agreement_of(
    sums: TokenSums, dtype: str, server_dtype: str | None, settings: TrainSettings, staleness: Staleness
) -> Agreement:
    """How server and trainer agree on tokens whose sums were measured under the weights that the round starts from."""
    limit = limit_of(server_dtype, dtype, settings.engine_mismatch)
    return Agreement(sums.mean("abs_diff"), sums.mean("k3"), limit, staleness.fresh, server_dtype, dtype)


def with_reference(trainer: TransitionGRPOTrainer, steps: Sequence[Step], reference: Any) -> list[Step]:
    """The steps with the log-probabilities of the model that the run started from; None: the policy without its adapter."""

    def scored(batch: MicroBatch) -> MicroBatch:
        if reference is not None:
            return replace(batch, reference=trainer.logprobs(batch, reference))
        with trainer.policy.disable_adapter():
            return replace(batch, reference=trainer.logprobs(batch))

    return [replace(step, micro_batches=tuple(scored(batch) for batch in step.micro_batches)) for step in steps]


def largest(step: Step) -> MicroBatch:
    """The micro-batch with most tokens."""
    return max(step.micro_batches, key=lambda batch: batch.tokens.size)
