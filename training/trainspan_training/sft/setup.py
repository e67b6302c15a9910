"""Assembles a job: rows, model or adapter, plan and trainer."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from trainspan_schemas.config.settings import SftSettings
from trainspan_schemas.errors import TrainingError
from trainspan_training.data.layout import batch_layout
from trainspan_training.devices.team import Team
from trainspan_training.model.loading import load_config, load_model, load_tokenizer
from trainspan_training.model.lora import add_adapter
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective import attention, memory
from trainspan_training.objective.options import compute_dtype
from trainspan_training.sft.data.conversations import hold_out
from trainspan_training.sft.data.examples import Example
from trainspan_training.sft.data.rows import check_rows, read_rows
from trainspan_training.sft.options import for_training
from trainspan_training.sft.plan import plan_of
from trainspan_training.sft.stopping import StopSignal
from trainspan_training.sft.trainer import ConversationTrainer
from trainspan_training.sft.training import OnEvent, Training
from trainspan_training.sft.work_folder import WorkFolder

__all__ = ["set_up"]


def set_up(
    settings: SftSettings,
    policy: Policy,
    examples: Sequence[Example],
    work: WorkFolder,
    stop: StopSignal,
    on_event: OnEvent,
    template: str | None,
    device: str,
) -> Training:
    """Renders the data and loads the model.

    Raises NothingToTrainError if no answer can be trained, DatasetError, ConfigError, CheckpointError or TrainingError.
    """
    shared, cuda = for_training(settings), torch.cuda.is_available()
    if cuda and (devices := torch.cuda.device_count()) > 1:
        raise TrainingError(f"{devices} GPUs are visible, and sft trains on one: set CUDA_VISIBLE_DEVICES")
    config, tokenizer = load_config(policy.model), load_tokenizer(policy.model)
    made = read_rows(settings, config, policy.model, tokenizer, examples, template)
    budget = memory.fit(config, shared, memory.available(shared, cuda=cuda), cuda=cuda, team=Team())
    shared = replace(shared, gradient_checkpointing=budget.kept < budget.longest)
    check_rows(made.rows, int(config.get_text_config().vocab_size), budget.longest)
    dtype = compute_dtype(shared, cuda=cuda)
    model = load_model(policy.model, frozen=settings.adapter == "lora" and dtype == "bfloat16")
    masks = attention.prepare(model, settings.forward)
    layout = batch_layout(shared, config, cuda=cuda, budget=budget, masks=masks)
    plan = plan_of(*hold_out(made.rows, settings.eval_fraction, settings.seed), layout, settings)
    if settings.adapter == "lora":
        model = add_adapter(model, shared, policy)
    trainer = ConversationTrainer(model, tokenizer, shared, [], str(work.path), budget)
    return Training(settings, policy, made, plan, trainer, work, stop, on_event, template, device, dtype)
