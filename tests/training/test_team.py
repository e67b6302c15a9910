"""Several processes as a user starts them: the same command, twice."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.dataset_files import sample_rollouts, write_dataset
from trainspan_schemas.checkpoint import CheckpointMeta
from trainspan_schemas.errors import TrainingError
from trainspan_training.team import Team


def train(folder: Path, model_dir: Path, processes: int, *options: str) -> list[dict[str, Any]]:
    """Runs `trainspan train` in so many processes (gloo); the events that they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trainspan_cli", "train", "--model", str(model_dir), "--policy-url", "none"]
    command += ["--learning-rate", "1e-5", "--format", "json", *options]
    team = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if processes > 1 else {}
    shared = os.environ | {"TRAINSPAN_HOME": str(folder), "OMP_NUM_THREADS": "1"} | team
    running = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        answers = [process.communicate(timeout=270) for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise ChildProcessError("\n".join(error for _, error in answers))
    return [json.loads(line) for out, _ in answers for line in out.splitlines()]


def test_weights_that_are_split_over_processes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(TrainingError, match=r"ACCELERATE_USE_FSDP is set: weights that are split .* are not supported"):
        Team.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_two_processes_make_the_weights_of_one(
    tmp_path: Path, model: Any, model_dir: Path, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds, the second on data of an older version, so that the old policy is recomputed in both processes."""
    monkeypatch.setenv("TRAINSPAN_TRAIN__ADAPTER", adapter)
    monkeypatch.setenv("TRAINSPAN_TRAIN__KL_COEF", "0.1")
    monkeypatch.setenv("TRAINSPAN_TRAIN__MICRO_BATCH_TOKENS", "200")
    events = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        for round_ in range(2):
            write_dataset(folder / "dataset", sample_rollouts(model, rollouts=9, seed=round_), round_=round_)
        events[processes] = train(folder, model_dir, processes, "--follow", "--rounds", "2")
    assert [event["event"] for event in events[2]] == ["ready", "round", "round"], "one process speaks"
    for one, two in zip(events[1][1:], events[2][1:], strict=True):
        for name in ("loss", "grad_norm", "logp_diff_mean", "entropy", "clip_fraction"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
        assert two["tokens"]["trained"] == one["tokens"]["trained"]
    file = "adapter_model.safetensors" if adapter == "lora" else "model.safetensors"
    weights = [load_file(tmp_path / str(processes) / "checkpoints/policy-000002" / file) for processes in (1, 2)]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 1e-5
    assert CheckpointMeta.read(tmp_path / "2/checkpoints/policy-000002").parent == "policy-000001"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_error_of_the_leader_ends_every_process_with_its_line(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ChildProcessError) as failed:
        train(tmp_path, model_dir, 2)
    assert str(failed.value).count("trainspan: no dataset in ") == 2
