"""Faults between server and trainer turn the integrity panel red: the server's samples do not match the trainer."""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.dataset_files import LoggedCall, sample_rollouts, write_dataset
from tests.training.support.sessions import GENTLE
from trainspan_loop.checks.integrity import training_checks
from trainspan_training.model.loading import load_model
from trainspan_training.rounds.result import RoundResult
from trainspan_training.session import TrainJob, train

FRESH = {"version": 2, "canary": {"status": "fresh", "evidence": "told"}}


class Server:
    """The model as computed by a server: all in bfloat16, with final logits in float32; or unchanged."""

    def __init__(self, model: Any, dtype: str) -> None:
        self.config = model.config
        self._model = copy.deepcopy(model).to(getattr(torch, dtype)).eval()

    def __call__(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self._model(input_ids).logits.float())


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """The dtype that server and trainer compute in."""
    return str(request.param)


@pytest.fixture
def second_round(tmp_path: Path, model: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> Any:
    """Trains a first round, then one on calls labeled version 1; returns the panel's verdicts on the second."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    settings = dataclasses.replace(GENTLE, model=str(model_dir), learning_rate=1e-3, dtype=dtype)

    def run() -> RoundResult:
        results: list[RoundResult] = []
        job = TrainJob(settings, tmp_path / "dataset", tmp_path / "checkpoints", follow=True, rounds=1)
        train(job, lambda *_: None, results.append)
        return results[0]

    write_dataset(tmp_path / "dataset", sample_rollouts(Server(model, dtype), rollouts=6), round_=0)
    assert run().version == 1

    def second(calls: list[LoggedCall]) -> dict[str, bool]:
        labeled = [dataclasses.replace(call, policy_version=1) for call in calls]
        write_dataset(tmp_path / "dataset", labeled, round_=1)
        event = dataclasses.replace(run().event(), swap=FRESH)
        expected = "logged" if dtype == "float32" else "recompute"
        assert (event.agreement or {})["trainer_dtype"] == dtype
        panel = {check.name: check.ok for check in training_checks(event)}
        assert panel["server and trainer agree"] == ("engine_mismatch" not in metrics()["alarms"])
        if all(panel.values()):
            assert metrics()["old_policy"] == expected
        return panel

    def metrics() -> dict[str, Any]:
        return dict(json.loads((tmp_path / "checkpoints/metrics.jsonl").read_text().splitlines()[-1]))

    return second


def test_the_weights_that_the_trainer_published_make_the_panel_green(
    second_round: Any, tmp_path: Path, dtype: str
) -> None:
    published = load_model(tmp_path / "checkpoints/policy-000001").eval()
    assert all(second_round(sample_rollouts(Server(published, dtype), rollouts=6, seed=1)).values())


def test_frozen_weights_of_the_server_make_it_red(second_round: Any, model: Any, dtype: str) -> None:
    """The server kept sampling from version 0 and labeled it 1."""
    assert not second_round(sample_rollouts(Server(model, dtype), rollouts=6, seed=1))["server and trainer agree"]


def test_ids_that_were_made_again_from_text_make_it_red(second_round: Any, tmp_path: Path, dtype: str) -> None:
    """One prompt token in each rollout differs from what the server saw, as after decoding and encoding."""
    published = load_model(tmp_path / "checkpoints/policy-000001").eval()
    calls = sample_rollouts(Server(published, dtype), rollouts=6, turns=1, seed=1)
    changed = [dataclasses.replace(c, prompt_ids=[*c.prompt_ids[:-1], 3 + (c.prompt_ids[-1] + 1) % 200]) for c in calls]
    assert not second_round(changed)["server and trainer agree"]


def test_logprobs_of_another_distribution_make_it_red(second_round: Any, tmp_path: Path, dtype: str) -> None:
    """As if the server had not applied a temperature: 2% of the values is enough."""
    published = load_model(tmp_path / "checkpoints/policy-000001").eval()
    calls = sample_rollouts(Server(published, dtype), rollouts=6, seed=1)
    raw = [dataclasses.replace(call, logprobs=(1.02 * np.array(call.logprobs)).tolist()) for call in calls]
    assert not second_round(raw)["server and trainer agree"]
