"""Memory for a policy server that wakes on the trainer's GPU."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.training.support.sessions import GENTLE, Run
from trainspan_training.checkpoints.swap_request import Swap
from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer
from trainspan_training.rounds import publication

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize(("device", "emptied"), [("cuda", 1), ("cpu", 0)])
def test_gradients_are_dropped_and_the_cache_of_a_gpu_is_emptied(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, device: str, emptied: int
) -> None:
    trainer = make_trainer()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    left: list[int] = []

    def empty() -> None:
        left.append(sum(parameter.grad is not None for parameter in trainer.model.parameters()))

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    fake = SimpleNamespace(device=torch.device(device), unwrap_model=lambda model: model)
    monkeypatch.setattr(trainer, "accelerator", fake)
    trainer.free_memory()
    assert left == [0] * emptied
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_memory_is_free_before_the_server_is_asked_to_swap_and_after_a_round_that_failed(
    run: Run, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def publish(*_: Any, **__: Any) -> Swap:
        done.append("swap")
        return Swap("swapped", None)

    monkeypatch.setattr(TransitionGRPOTrainer, "free_memory", lambda _: done.append("free"))
    monkeypatch.setattr(publication, "swap_in", publish)
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    run(rounds=1)
    assert done == ["free", "swap"]
    (failed,) = run(dataclasses.replace(GENTLE, max_kl=1e-30), rounds=1)
    assert failed.error
    assert done == ["free", "swap", "free"]
