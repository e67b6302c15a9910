"""Shared by tests of whole rounds: settings that change little and leave every step as planned, and inspection of weights on disk."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.dataset_files import sample_rollouts, write_dataset
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.rounds.result import RoundResult
from trainspan_training.session import TrainJob, train

GENTLE = TrainSettings(policy_url="none", learning_rate=1e-5, rollouts_per_step=2, warmup_rounds=0, target_kl=0.0)

Run = Callable[..., list[RoundResult]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def names(file: Any) -> list[str]:
    return list(file.keys())


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def follow(
    tmp_path: Path,
    model_dir: Path,
    rounds: int,
    *,
    checkpoints: str = "checkpoints",
    datasets: str = "dataset",
    after: Callable[[RoundResult], None] = lambda _: None,
    **changes: Any,
) -> list[RoundResult]:
    """Trains so many datasets; calls `after` after each."""
    settings = dataclasses.replace(GENTLE, model=str(model_dir), **changes)
    results: list[RoundResult] = []

    def on_result(result: RoundResult) -> None:
        results.append(result)
        after(result)

    job = TrainJob(settings, tmp_path / datasets, tmp_path / checkpoints, follow=True, rounds=rounds)
    train(job, lambda *_: None, on_result)
    return results


def write(tmp_path: Path, model: Any, *rounds: int, folder: str = "dataset") -> None:
    for round_ in rounds:
        write_dataset(tmp_path / folder, sample_rollouts(model, rollouts=4, seed=round_), round_=round_)
