"""Shared by tests of whole rounds: settings that change little and leave every step as planned, and inspection of weights on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.rounds.result import RoundResult

GENTLE = TrainSettings(policy_url="none", learning_rate=1e-5, rollouts_per_step=2, warmup_rounds=0, target_kl=0.0)

Run = Callable[..., list[RoundResult]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def names(file: Any) -> list[str]:
    return list(file.keys())


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
