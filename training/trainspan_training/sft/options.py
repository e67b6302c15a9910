"""Validates the settings of `[sft]` before anything heavy is imported, and converts them for the modules shared with `[train]`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from trainspan_schemas.config.settings import SftSettings, TrainSettings
from trainspan_schemas.errors import CheckpointError, ConfigError, TrainingError
from trainspan_training.objective import options

__all__ = ["check", "for_training", "own_names"]

_SHARED = (
    *("adapter", "lora_rank", "lora_alpha", "lora_targets", "device", "dtype", "memory_gib"),
    *(
        "gradient_checkpointing",
        "micro_batch_tokens",
        "forward",
        "learning_rate",
        "max_grad_norm",
        "weight_decay",
        "seed",
    ),
)
"""Settings that mean the same in `[train]`."""
_NAMES = re.compile(rf"\btrain\.({'|'.join(_SHARED)})\b")

_POSITIVE = ("epochs", "max_steps", "batch_tokens", "max_tokens", "eval_every")


def check(settings: SftSettings) -> None:
    """Raises ConfigError for a setting that is unknown, invalid, or has no effect with the others."""
    for name in _POSITIVE:
        if (value := getattr(settings, name)) is not None and not value > 0:
            raise ConfigError(f"sft.{name} = {value} must be greater than 0")
    for name in ("warmup", "eval_fraction"):
        if not 0 <= (value := getattr(settings, name)) < 1:
            raise ConfigError(f"sft.{name} = {value} must be at least 0 and less than 1")
    if not settings.save_every_s >= 0:
        raise ConfigError(f"sft.save_every_s = {settings.save_every_s} must not be less than 0")
    if settings.lora_result == "adapter" and settings.adapter == "none":
        raise ConfigError('sft.lora_result = "adapter" has no effect: adapter = "none" trains no adapter')
    with own_names():
        options.check(for_training(settings))


def for_training(settings: SftSettings) -> TrainSettings:
    """The settings of `[train]` with the same effect on model, memory and forward pass."""
    return TrainSettings(policy_url="none", **{name: getattr(settings, name) for name in _SHARED})


@contextmanager
def own_names() -> Iterator[None]:
    """Within the block, errors that name a setting as `train.NAME` name it as `sft.NAME`."""
    try:
        yield
    except (ConfigError, CheckpointError, TrainingError) as error:
        message = _NAMES.sub(r"sft.\1", str(error))
        if message == str(error):
            raise
        raise type(error)(message) from error
