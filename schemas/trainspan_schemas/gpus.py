"""The NVIDIA GPUs of this machine as their driver lists them, found without PyTorch.

NVML is part of every NVIDIA driver, also under WSL2, where no /dev/nvidiaN exists, and does not start CUDA in this process.
API: https://docs.nvidia.com/deploy/nvml-api/
"""

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["LEAST_DRIVER", "VISIBLE", "VISIBLE_AMD", "Gpus", "installed_gpus", "visible_gpus"]

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"  # PyTorch and vLLM use it on AMD GPUs too
VISIBLE_AMD: Final = "HIP_VISIBLE_DEVICES"  # must have the same value if it is set
LEAST_DRIVER: Final = 580
"""The oldest branch of the driver that runs CUDA 13, for which PyTorch 2.13 and vLLM 0.32 are built.

https://docs.nvidia.com/deploy/cuda-compatibility/"""
_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_DEVICE_FILE = re.compile(r"nvidia\d+")
_CHARACTERS = 96


@dataclass(frozen=True, slots=True)
class Gpus:
    """What the driver lists; nothing on a machine without an NVIDIA driver."""

    names: tuple[str, ...] = ()
    """Such as `NVIDIA H100 80GB HBM3`, in NVML's order."""
    driver: str | None = None
    """Version such as `580.95.05`; None if the driver does not answer."""

    def __str__(self) -> str:
        if not self.names:
            return "no NVIDIA GPU"
        kinds = (f"{self.names.count(name)} × {name}" for name in dict.fromkeys(self.names))
        cards = self.names[0] if len(self.names) == 1 else ", ".join(kinds)
        return f"{cards}, driver {self.driver or 'unknown'}"

    @property
    def trouble(self) -> str | None:
        """Why CUDA 13 cannot use these GPUs, and what to do about it; None if the driver is recent enough."""
        if not self.names:
            return None
        if self.driver is None:
            return "its driver does not answer (nvidia-smi shows the reason)"
        if int(self.driver.partition(".")[0]) < LEAST_DRIVER:
            return f"CUDA 13 needs a driver of branch {LEAST_DRIVER} or later: update it"
        return None


def installed_gpus(load: Callable[[str], Any] = ctypes.CDLL, dev: Path = Path("/dev")) -> Gpus:
    """Asks NVML; if it does not answer, counts the driver's device files."""
    for path in _LIBRARIES:
        try:
            return _listed(load(path))
        except (OSError, AttributeError):
            continue
    files = [path for path in dev.iterdir() if _DEVICE_FILE.fullmatch(path.name)]
    return Gpus(("NVIDIA GPU",) * len(files))


def visible_gpus(environ: Mapping[str, str], installed: Gpus | None = None) -> tuple[str, ...]:
    """Names as in CUDA_VISIBLE_DEVICES of the GPUs that a process may use: those in its environment, else all installed."""
    given = environ.get(VISIBLE, environ.get(VISIBLE_AMD))
    if given is not None:
        names = tuple(name.strip() for name in given.split(",") if name.strip())
        return names[: names.index("-1")] if "-1" in names else names
    return tuple(str(index) for index in range(len((installed or installed_gpus()).names)))


def _listed(nvml: Any) -> Gpus:
    """Raises OSError if a function of NVML fails."""

    def call(function: str, *arguments: Any) -> None:
        if code := getattr(nvml, function)(*arguments):
            raise OSError(f"{function}: {code}")

    def text(function: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_CHARACTERS)
        call(function, *arguments, buffer, ctypes.c_uint(_CHARACTERS))
        return buffer.value.decode()

    call("nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        names = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            names.append(text("nvmlDeviceGetName", device))
        return Gpus(tuple(names), text("nvmlSystemGetDriverVersion"))
    finally:
        nvml.nvmlShutdown()
