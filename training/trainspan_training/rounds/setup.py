"""Assembles a training process: model or adapter, TRL's trainer, and its rounds."""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from trainspan_schemas.artifacts.checkpoint import base_digest
from trainspan_schemas.command_events import TrainingProgress
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import CheckpointError
from trainspan_training.checkpoints.swap_request import PolicyAddress
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.data.layout import TokenBudget, batch_layout
from trainspan_training.data.loss_weights import Rule
from trainspan_training.devices.leader import Leader
from trainspan_training.devices.team import Team
from trainspan_training.model.chat_turns import chat_turns
from trainspan_training.model.full_weights import FullWeights, has_slices
from trainspan_training.model.kernels import accelerate_layers
from trainspan_training.model.loading import find_model, hollow_model, load_config, load_model, load_tokenizer
from trainspan_training.model.lora import AdapterWeights, add_adapter
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective import attention, memory
from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer
from trainspan_training.objective.options import compute_dtype
from trainspan_training.rounds.missing_state import MissingState
from trainspan_training.rounds.result import RoundResult
from trainspan_training.rounds.rounds import Rounds

__all__ = ["set_up"]

log = logging.getLogger(__name__)


def set_up(
    datasets: Iterable[DatasetFolder],
    leader: Leader,
    policy: Policy,
    settings: TrainSettings,
    rule: Rule,
    on_progress: Callable[[TrainingProgress], None],
    on_result: Callable[[RoundResult], None],
    team: Team,
    *,
    address: PolicyAddress,
    keep_going: bool,
    missing_state: MissingState | None = None,
) -> Rounds:
    """Loads everything and returns the rounds. Raises CheckpointError, ConfigError or TrainingError if that fails."""
    if missing_state:
        policy = missing_state.parent
    config, cuda = load_config(policy.model), torch.cuda.is_available()
    tokenizer = load_tokenizer(policy.model)
    turns = chat_turns(tokenizer, config, policy.model) if settings.observation_weight else None
    budget = _budget(config, settings, team, cuda=cuda)
    settings = replace(settings, gradient_checkpointing=budget.kept < budget.longest)
    model, unloaded = _load(policy, config, settings, team, cuda=cuda)
    masks = attention.prepare(model, settings.forward)
    layout = batch_layout(settings, config, cuda=cuda, budget=budget, masks=masks, processes=team.size)
    if layout.padded_because and team.leads:
        log.warning("rows are padded, and prefixes that they share are forwarded again: %s", layout.padded_because)
    adapted = settings.adapter == "lora"
    if adapted:
        model = add_adapter(model, settings, policy)
    rounds = Rounds(
        datasets,
        leader,
        policy,
        settings,
        on_progress,
        on_result,
        address=address,
        layout=layout,
        rule=rule,
        weights=AdapterWeights(model) if adapted else FullWeights(model),
        keep_going=keep_going,
        missing_state=missing_state,
        unloaded=unloaded,
        turns=turns,
    )
    output_dir = str(leader.resource.root) if leader.resource else "."
    rounds.trainer = TransitionGRPOTrainer(model, tokenizer, settings, rounds, output_dir, team=team, budget=budget)
    if settings.kl_coef and not adapted:
        rounds.reference = _reference(policy, settings, cuda=cuda).to(rounds.trainer.accelerator.device)
    return rounds


def _budget(config: Any, settings: TrainSettings, team: Team, *, cuda: bool) -> TokenBudget:
    """The token budget of this process, which shares memory with the other processes of its machine."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", team.size))
    free = memory.available(settings, cuda=cuda, processes=processes)
    return memory.fit(config, settings, free, cuda=cuda, team=team)


def _load(policy: Policy, config: Any, settings: TrainSettings, team: Team, *, cuda: bool) -> tuple[Any, bool]:
    """The model, and whether it is unloaded, that is, without weights until it is split."""
    bf16 = compute_dtype(settings, cuda=cuda) == "bfloat16"
    model = hollow_model(config) if team.splits else None
    unloaded = model is not None and has_slices(model, policy.model)
    if not unloaded:  # split weights must all have one dtype
        model = load_model(policy.model, frozen=settings.adapter == "lora" and bf16 and not team.splits)
    return accelerate_layers(model, bf16=bf16) if cuda else model, unloaded


def _reference(policy: Policy, settings: TrainSettings, *, cuda: bool) -> Any:
    """The model that the run started from, without gradients; it forwards rows in the same way as the policy.

    Raises CheckpointError if its folder has other weights since then.
    """
    folder, halved = find_model(policy.base), compute_dtype(settings, cuda=cuda) == "bfloat16"
    if policy.base_digest and base_digest(folder) != policy.base_digest:
        raise CheckpointError(
            f"{policy.base} has other weights than when the run started from it, and train.kl_coef compares with those: "
            "put them back, or set it to 0"
        )
    model = load_model(folder, frozen=halved).requires_grad_(False)
    attention.prepare(model, settings.forward)
    return accelerate_layers(model, bf16=halved) if cuda else model
