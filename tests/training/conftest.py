"""Tiny models, built once, and trainers for them."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.training.support.processes.imports import import_once
from tests.training.support.sessions import GENTLE, Run
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.model.loading import load_model, load_tokenizer
from trainspan_training.rounds.result import RoundResult
from trainspan_training.session import TrainJob, train


@pytest.fixture(scope="session", autouse=True)
def training_imports() -> None:
    """TRL without vLLM, and one thread: other processes share the cores."""
    import_once()
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("untied"), hidden=32, context=512)


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tied"), hidden=32, context=512, tied=True)


@pytest.fixture(scope="session")
def model(model_dir: Path) -> Any:
    """The model in float32, for logging and references; must not be changed."""
    return load_model(model_dir).eval()


@pytest.fixture(scope="session")
def double_model(model: Any) -> Any:
    """A model in float64 with the same vocabulary; must not be changed."""
    from tests.training.support.exactness.trainers import double_gpt2

    return double_gpt2(model.config.vocab_size)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate state folder for each test."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))


@pytest.fixture
def run(home: None, tmp_path: Path, model_dir: Path) -> Run:
    """Trains from `model_dir` on tmp_path/dataset into tmp_path/checkpoints; returns the results."""

    def _run(settings: TrainSettings = GENTLE, *, rounds: int | None = None, **job: Any) -> list[RoundResult]:
        results: list[RoundResult] = []
        settings = settings if settings.model else dataclasses.replace(settings, model=str(model_dir))
        chosen = {"datasets": tmp_path / "dataset", "checkpoints": tmp_path / "checkpoints"} | job
        train(TrainJob(settings, follow=rounds is not None, rounds=rounds, **chosen), lambda *_: None, results.append)
        return results

    return _run


@pytest.fixture
def make_trainer(model_dir: Path, double_model: Any, tmp_path: Path) -> Callable[..., Any]:
    """Makes a trainer with its own copy of the model, or of the double one."""

    def make(settings: TrainSettings | None = None, *, double: bool = False, dtype: str = "float32") -> Any:
        from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

        model = copy.deepcopy(double_model) if double else load_model(model_dir)
        chosen = dataclasses.replace(settings or TrainSettings(), dtype=dtype)
        return TransitionGRPOTrainer(model, load_tokenizer(model_dir), chosen, [], str(tmp_path / "trainer"))

    return make
