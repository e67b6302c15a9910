"""Which device serves, what part of its memory, and when that is refused."""

from typing import Any

import pytest

from trainspan_schemas.config.settings import ServingSettings
from trainspan_schemas.errors import ProcessError
from trainspan_schemas.gpus import Gpus
from trainspan_serving.process import device
from trainspan_serving.process.device import ServerDevice, choose_device, last_value

L4 = Gpus(("NVIDIA L4",), "580.95.05")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(
        installed: Gpus, *flags: str, cpu: bool = False, environ: dict[str, str] | None = None, **settings: Any
    ) -> ServerDevice:
        monkeypatch.setattr(device, "installed_gpus", lambda: installed)
        return choose_device(ServingSettings(**settings), flags, environ or {}, is_cpu_build=cpu)

    return choose


def test_a_gpu_is_not_left_unused_unnoticed(chosen: Any) -> None:
    with pytest.raises(ProcessError, match=r"NVIDIA L4, driver 580.95.05 is here, but this vLLM is a build for CPUs"):
        chosen(L4, cpu=True)
    for told in ({"device": "cpu"}, {"environ": {"CUDA_VISIBLE_DEVICES": ""}}):
        assert chosen(L4, cpu=True, **told) == ServerDevice("the CPU", is_cpu=True, leaves_room=False)
    with pytest.raises(ProcessError, match=r"--device cuda, but this vLLM is a build for CPUs"):
        chosen(Gpus(), cpu=True, device="cuda")
    with pytest.raises(ProcessError, match=r"--device cpu needs a build of vLLM for CPUs"):
        chosen(L4, device="cpu")
    with pytest.raises(ProcessError, match=r"NVIDIA L4, driver 550.1: CUDA 13 needs a driver of branch 580 or later"):
        chosen(Gpus(("NVIDIA L4",), "550.1"))


def test_the_only_gpu_is_shared_with_a_trainer_unless_a_flag_sets_the_memory(chosen: Any) -> None:
    shared = chosen(L4)
    assert (shared.leaves_room, shared.is_cpu) == (True, False)
    flags = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.4")
    assert shared.describe(flags) == "NVIDIA L4, driver 580.95.05 in bfloat16, with 0.4 of its memory"
    assert shared.describe((*flags, "--dtype=float16")).startswith("NVIDIA L4, driver 580.95.05 in float16")
    assert not chosen(L4, "--gpu_memory_utilization=0.9").leaves_room
    assert not chosen(L4, "--kv-cache-memory-bytes", "8G").leaves_room
    assert not chosen(L4, checkpoints_url="http://trainer:8090").leaves_room
    assert not chosen(Gpus(L4.names * 2, L4.driver), environ={"CUDA_VISIBLE_DEVICES": "0"}).leaves_room


def test_the_last_flag_wins_in_any_spelling() -> None:
    flags = ("--dtype", "float32", "--max-num-seqs", "8", "--dtype=bfloat16", "--enforce-eager")
    assert last_value(flags, "--dtype") == "bfloat16"
    assert last_value(flags, "--max-num-seqs") == "8"
    assert last_value(flags, "--seed") is None
