"""`make bench`: runs the measurements in sequence, prints them and stores them with commit and machine.

Each runs in a separate process, so that children's peak memory, imports and thread settings do not affect the next one.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainspan_schemas.resources import available_cores, available_memory_bytes

MODULES = (
    "collector",
    "serving",
    "agents",
    "startup",
    "rollouts",
    "processing",
    "training",
    "accelerator",
    "offpolicy",
)
BY_NAME = (
    "adapters",
    "branches",
    "canary",
    "checkpointing",
    "filling",
    "fitting",
    "overlap",
    "ray_dataset",
    "ray_rollouts",
    "reading",
    "sampling",
    "stored_spans",
    "stream",
    "threads",
    "trials",
    "viewer",
    "viewer_ingest",
    "viewer_crawl",
)
"""Measurements that take long or need a pretrained model; they run only if they are named."""
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The machine that the figures depend on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory_gib = available_memory_bytes() / 2**30
    return {
        "cpu": model,
        "cores": available_cores(),
        "memory_gib": round(memory_gib, 1),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit, marked if the working tree differs from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measured(name: str) -> dict[str, Any]:
    """The figures of one module. Exits with its error if it fails."""
    program = f"import json; from benchmarks.{name} import measure; print(json.dumps(measure()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stderr}\nbenchmarks.{name} failed")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES, help=f"some of {', '.join(MODULES + BY_NAME)}")
    modules = parser.parse_args().modules
    results: dict[str, Any] = {
        "commit": commit(),
        "machine": machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for name in modules:
        began = time.monotonic()
        print(f"# {name}", flush=True)
        results[name] = measured(name)
        for key, value in results[name].items():
            print(f"{key:<48} {value}")
        print(f"({time.monotonic() - began:.0f} s)\n", flush=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "-".join(["bench", *(() if tuple(modules) == MODULES else modules)])
    path = path.with_suffix(".json")
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"stored in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
