"""Finding GPUs without PyTorch: by NVML, else by the driver's device files."""

import ctypes
from pathlib import Path
from typing import Any

import pytest

from trainspan_schemas.gpus import Gpus, installed_gpus, visible_gpus

H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"


class Nvml:
    """Stands for the driver's library, with the C functions' arguments."""

    def __init__(self, *names: str, init: int = 0) -> None:
        self.names, self.init, self.is_open = names, init, False

    def nvmlInit_v2(self) -> int:
        self.is_open = not self.init
        return self.init

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.value = 0x7FFF_0000_0000 + index.value
        return 0

    def nvmlDeviceGetName(self, device: Any, buffer: Any, length: Any) -> int:
        assert length.value == ctypes.sizeof(buffer)
        buffer.value = self.names[device.value - 0x7FFF_0000_0000].encode()
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, _length: Any) -> int:
        buffer.value = b"580.95.05"
        return 0


def test_the_driver_is_asked_where_there_are_no_device_files(tmp_path: Path) -> None:
    """WSL2 has /dev/dxg, and its library may be in a folder of its own only."""
    (tmp_path / "dxg").touch()
    nvml = Nvml(H100, L4, H100)

    def load(path: str) -> Any:
        if not path.startswith("/usr/lib/wsl/"):
            raise OSError("not there")
        return nvml

    found = installed_gpus(load, tmp_path)
    assert found == Gpus((H100, L4, H100), "580.95.05")
    assert str(found) == f"2 × {H100}, 1 × {L4}, driver 580.95.05"
    assert not nvml.is_open
    assert visible_gpus({}, found) == ("0", "1", "2")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,-1,0"}, found) == ("2",)


@pytest.mark.parametrize("nvml", [Nvml(H100, init=18), object()])
def test_a_driver_that_does_not_answer_leaves_its_device_files(nvml: Any, tmp_path: Path) -> None:
    assert installed_gpus(lambda _: nvml, tmp_path) == Gpus()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia12"):
        (tmp_path / name).touch()
    found = installed_gpus(lambda _: nvml, tmp_path)
    assert found == Gpus(("NVIDIA GPU",) * 2)
    assert found.trouble is not None
    assert visible_gpus({}, found) == ("0", "1")


def test_a_machine_without_a_driver_has_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    found = installed_gpus(_missing, tmp_path)
    assert (found, str(found), found.trouble) == (Gpus(), "no NVIDIA GPU", None)


def _missing(path: str) -> Any:
    raise OSError(path)


@pytest.mark.parametrize(("driver", "is_enough"), [("579.99", False), ("580.65.06", True), ("610.1", True)])
def test_a_driver_older_than_cuda_13_is_named(driver: str, is_enough: bool) -> None:
    assert (Gpus((L4,), driver).trouble is None) is is_enough
