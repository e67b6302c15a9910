"""Training says what it computes on, and does not fall back to the CPU unnoticed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dataset_files import sample_rollouts, write_dataset
from trainspan_cli.main import run
from trainspan_schemas.errors import TrainingError
from trainspan_schemas.gpus import Gpus
from trainspan_training.devices import device
from trainspan_training.devices.device import device_name, hide_gpus

H100 = Gpus(("NVIDIA H100",), "580.95.05")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what NVML and PyTorch report, and the environment."""

    def set_up(installed: Gpus, build: str | None = None, **environ: str) -> None:
        monkeypatch.setattr(device, "installed_gpus", lambda: installed)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            monkeypatch.setenv(name, "")  # so that a value that the trainer sets is removed at the end
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return set_up


@pytest.mark.parametrize(
    ("installed", "build", "environ", "reason"),
    [
        (H100, None, {}, "NVIDIA H100, driver 580.95.05 is here.*it is a build for CPUs"),
        (Gpus(("NVIDIA L4",), "570.1"), "13.0", {}, "CUDA 13 needs a driver of branch 580 or later"),
        (Gpus(("NVIDIA GPU",)), "13.0", {}, "its driver does not answer"),
        (H100, "13.0", {}, "Torch not compiled with CUDA enabled"),
    ],
)
def test_a_gpu_that_pytorch_does_not_see_is_refused(
    machine: Any, installed: Gpus, build: str | None, environ: dict[str, str], reason: str
) -> None:
    machine(installed, build, **environ)
    with pytest.raises(TrainingError, match=f"{reason}.*--device cpu"):
        device_name("auto")
    hide_gpus("cpu")
    assert device_name("cpu") == "the CPU"


def test_hidden_gpus_are_a_choice_and_cuda_is_a_demand(machine: Any) -> None:
    machine(H100, CUDA_VISIBLE_DEVICES="")
    assert device_name("auto") == "the CPU"
    machine(Gpus())
    assert device_name("auto") == "the CPU"
    with pytest.raises(TrainingError, match="--device cuda, but there is no GPU here"):
        device_name("cuda")


def test_the_commands_refuse_in_one_line_and_train_on_the_cpu_if_told(
    machine: Any, model: Any, model_dir: Path, tmp_path: Path, home: None, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(H100)
    write_dataset(tmp_path / "home" / "dataset", sample_rollouts(model, rollouts=4), round_=0)
    conversation = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "data.jsonl").write_text(json.dumps(conversation))
    sft = ["sft", "--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "warm"), "--model", str(model_dir)]
    train = ["train", "--model", str(model_dir), "--policy-url", "none", "--learning-rate", "1e-5"]
    for options in (sft, train):
        assert run(options) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("trainspan: NVIDIA H100, driver 580.95.05 is here, but PyTorch")
    assert run([*train, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("training on the CPU in float32\nround 0: ")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
