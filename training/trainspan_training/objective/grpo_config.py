"""TRL's configuration: our settings, and overrides of every TRL default that must not apply here."""

from pathlib import Path

import torch
from trl.trainer.grpo_config import GRPOConfig

from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.checkpoints.folder import PROJECT, run_name
from trainspan_training.objective.options import clip_range, compute_dtype, reporters

__all__ = ["grpo_config"]

_ENDLESS = 2**62
_LOSS_TYPES = {"clip": "dapo", "cispo": "cispo"}
"""Our loss → TRL's. Its dapo sums the clipped surrogate over tokens and divides by our number: we set the weights."""
_TIMEOUT_S = 30 * 24 * 3600


def grpo_config(settings: TrainSettings, output_dir: str) -> GRPOConfig:
    """Configuration for one optimizer step per dataloader item; TRL saves, logs and generates nothing."""
    cuda = torch.cuda.is_available()
    low, high = clip_range(settings)
    return GRPOConfig(
        output_dir=output_dir,
        use_cpu=not cuda,
        bf16=compute_dtype(settings, cuda=cuda) == "bfloat16",
        gradient_checkpointing=bool(settings.gradient_checkpointing),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        loss_type=_LOSS_TYPES[settings.loss],
        epsilon=1 - low if settings.loss == "clip" else 0.2,
        epsilon_high=high - 1 if settings.loss == "clip" else high,
        beta=0.0,  # see `grpo_trainer`: TRL's KL term ignores weights
        lr_scheduler_type="constant",  # the rate of each step is set in `training_step`
        weight_decay=settings.weight_decay,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=0.0,  # clipped in `training_step`, before the optimizer can see a non-finite gradient
        seed=settings.seed,
        max_steps=_ENDLESS,
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        logging_strategy="no",
        save_strategy="no",
        report_to=reporters(settings),
        run_name=run_name(Path(output_dir)),
        project=PROJECT,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        ddp_timeout=_TIMEOUT_S,
    )
