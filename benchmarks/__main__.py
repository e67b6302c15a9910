"""`make bench`: runs the measurements in sequence, prints them and stores them with commit and machine.

Each runs in a separate process, so that children's peak memory, imports and thread settings do not affect the next one.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainspan_schemas.resources import available_cores, available_memory_bytes

MODULE_OF = {
    "collector": "collector.collector",
    "serving": "serving.serving",
    "agents": "exporters.agents",
    "startup": "exporters.startup",
    "outage": "exporters.outage",
    "rollouts": "rollouts.rollouts",
    "processing": "processing.processing",
    "training": "training.training",
    "accelerator": "training.accelerator",
    "importing": "importers.importing",
    "branches": "rollouts.branches",
    "canary": "serving.canary",
    "ray_dataset": "processing.ray_dataset",
    "ray_rollouts": "rollouts.ray_rollouts",
    "sampling": "serving.sampling",
    "stored_spans": "collector.stored_spans",
    "stream": "loop.stream",
    "trials": "loop.trials",
    "viewer": "viewer.viewer",
    "viewer_crawl": "viewer.viewer_crawl",
    "viewer_ingest": "viewer.viewer_ingest",
}
"""What the command calls a measurement → its module in this package."""
SHORT = ("collector", "serving", "agents", "startup", "rollouts", "processing", "training", "accelerator")
"""What runs if nothing is named: the others take long or need a pretrained model."""
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
        "load": round(os.getloadavg()[0], 1),
    }


def commit() -> str:
    """The commit, marked if the working tree differs from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measured(name: str) -> dict[str, Any]:
    """The figures of one measurement. Exits with its error if it fails."""
    program = f"import json; from benchmarks.{MODULE_OF[name]} import measure; print(json.dumps(measure()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stderr}\nbenchmarks.{MODULE_OF[name]} failed")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=SHORT, help=f"some of {', '.join(MODULE_OF)}")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in MODULE_OF]:
        parser.error(f"no measurement is called {unknown[0]!r}: choose from {', '.join(MODULE_OF)}")
    results: dict[str, Any] = {
        "commit": commit(),
        "machine": machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for name in names:
        began = time.monotonic()
        print(f"# {name}", flush=True)
        results[name] = measured(name)
        for key, value in results[name].items():
            print(f"{key:<48} {value}")
        print(f"({time.monotonic() - began:.0f} s)\n", flush=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "-".join(["bench", *(() if tuple(names) == SHORT else names)])
    path = path.with_suffix(".json")
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"stored in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
