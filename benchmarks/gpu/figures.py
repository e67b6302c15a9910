"""What the steps share: `$OUT/bench-gpu.json` in the form of `benchmarks/results/`, sizes, and failures that end one case only."""

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.__main__ import commit, machine

__all__ = ["OUT", "RESULTS", "SCRATCH", "TINY", "attempt", "matmul_rate", "note", "read"]

OUT = Path(os.environ.get("OUT", ".gpu/out"))
SCRATCH = Path(os.environ.get("GPU_KIT_SCRATCH", "/tmp/trainspan-gpu"))
TINY = os.environ.get("GPU_KIT_TINY") == "1"
"""Small enough for a CPU: shows that the steps run, not how fast."""
RESULTS = OUT / "bench-gpu.json"
_BEGAN = time.monotonic()


def read(section: str | None = None) -> dict[str, Any]:
    """All figures so far, or those of one section."""
    whole: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return whole if section is None else whole.get(section, {})


def note(section: str, name: str, value: Any) -> None:
    """Adds a figure to the file at once, so that a later failure loses nothing, and prints it."""
    whole = read() or _header()
    whole.setdefault(section, {})[name] = value
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text(json.dumps(whole, indent=2, default=str) + "\n")
    temporary.replace(RESULTS)
    print(f"RESULT {name}: {json.dumps(value, default=str)[:380]}", flush=True)


def attempt(section: str, name: str, make: Callable[[], Any], limit_s: float | None = None) -> Any:
    """Runs one case and notes its value, or its error. Skips it if this process has run for `limit_s`."""
    if limit_s is not None and not TINY and time.monotonic() - _BEGAN > limit_s:
        note(section, name, {"skipped": f"after {limit_s:g} s"})
        return None
    began = time.monotonic()
    with _memory_given_back():
        try:
            value = make()
        except Exception as error:  # noqa: BLE001 -- the next case may work
            traceback.print_exc()
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
            print(f"FAIL {name}: {text[:300]}", flush=True)
            note(section, name, {"error": text, "case_seconds": round(time.monotonic() - began, 1)})
            return None
        if isinstance(value, dict):
            value["case_seconds"] = round(time.monotonic() - began, 1)
        note(section, name, value)
        return value


def matmul_rate() -> float | None:
    """The rate of bf16 matrix products that `facts` measured, in operations per second."""
    rate = (read("facts").get("matmul_bf16") or {}).get("tflops")
    return None if rate is None else rate * 1e12


def _header() -> dict[str, Any]:
    return {
        "commit": os.environ.get("GPU_KIT_COMMIT") or commit(),
        "machine": {**machine(), **_card()},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _card() -> dict[str, str | None]:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {"card": None, "driver": None}
    name, _, driver = done.stdout.strip().splitlines()[0].rpartition(", ")
    return {"card": name, "driver": driver}


@contextmanager
def _memory_given_back() -> Iterator[None]:
    try:
        yield
    finally:
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()
