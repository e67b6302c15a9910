"""The machine: versions, the rate of matrix products on random data, bandwidth of copies and of transfers to the GPU."""

import platform
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from benchmarks.gpu.figures import SCRATCH, TINY, attempt

__all__ = ["main"]

_DISTRIBUTIONS = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "numpy",
    "xgrammar",
    "flash_attn",
    "vllm",
)


def main() -> None:
    attempt("facts", "versions", versions)
    attempt("facts", "unmet", unmet)
    attempt("facts", "nvidia_smi", nvidia_smi)
    attempt("facts", "torch", torch_build)
    attempt("facts", "matmul_bf16", lambda: product("bfloat16"))
    attempt("facts", "matmul_float32", lambda: product("float32"))
    attempt("facts", "copy", copy)
    attempt("facts", "upload", upload)


def versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def unmet() -> list[str]:
    """Requirements of the packages that were brought which the machine does not meet."""
    from packaging.requirements import Requirement

    missing = []
    for package in metadata.distributions(path=[str(SCRATCH / "site")]):
        for text in package.requires or ():
            needed = Requirement(text)
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                continue
            try:
                version = metadata.version(needed.name)
            except metadata.PackageNotFoundError:
                version = None
            if version is None or not needed.specifier.contains(version, prereleases=True):
                missing.append(f"{package.name} needs {needed}, here {version}")
    return sorted(missing)


def nvidia_smi() -> str:
    asked = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def torch_build() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "available": cuda,
        "devices": torch.cuda.device_count(),
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "float32_matmul": torch.get_float32_matmul_precision(),
    }


def product(dtype: str) -> dict[str, Any]:
    import torch

    device = _device()
    edge = 8192 if device == "cuda" and not TINY else 256
    left, right = (torch.randn(edge, edge, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    took = _seconds(lambda: left @ right, 20)
    return {"edge": edge, "seconds": took, "tflops": round(2 * edge**3 / took / 1e12, 3 if TINY else 1)}


def copy() -> dict[str, Any]:
    import torch

    device = _device()
    size = 2**31 if device == "cuda" and not TINY else 2**20
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).random_() for _ in range(2))
    took = _seconds(lambda: target.copy_(source), 10)
    return {"bytes": size, "tb_per_s": round(2 * size / took / 1e12, 5)}


def upload() -> dict[str, Any]:
    import torch

    if _device() == "cpu":
        return {"skipped": "no GPU"}
    size = 2**20 if TINY else 2**28
    pageable = torch.empty(size, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    return {
        "pageable_gb_per_s": round(size / _seconds(lambda: pageable.to("cuda"), 5) / 1e9, 2),
        "pinned_gb_per_s": round(size / _seconds(lambda: pinned.to("cuda"), 5) / 1e9, 2),
    }


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _seconds(act: Callable[[], Any], times: int) -> float:
    """Median over `times` of one call, by the device's clock on a GPU."""
    import torch

    cuda = torch.cuda.is_available()
    for _ in range(3):
        act()
    seconds = []
    for _ in range(times):
        if cuda:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            act()
            last.record()
            torch.cuda.synchronize()
            seconds.append(first.elapsed_time(last) / 1e3)
        else:
            began = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - began)
    return sorted(seconds)[len(seconds) // 2]


if __name__ == "__main__":
    main()
