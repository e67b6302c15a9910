"""The defaults for training a pretrained model: the chosen tokens per micro-batch, and their memory and time.

TRAINSPAN_BENCH_MODEL names its folder. One round of one step on 12 rollouts of 540 tokens, by `trainspan train` with the
defaults of `[train]` except for its limits, which the made-up log-probabilities would exceed.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.support.workload import Workload
from tests.support.dataset_files import write_dataset
from trainspan_schemas.command_events import RoundTrained, parse

__all__ = ["measure"]

WORK = Workload(groups=3, group=4, turns=4, prompt=300, sampled=30, observed=40)


def measure() -> dict[str, Any]:
    model = Path(os.environ["TRAINSPAN_BENCH_MODEL"])
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_dataset(folder / "dataset", WORK.calls(vocabulary))
        limits = {
            "MAX_KL": "1e9",
            "MAX_RATIO": "1e30",
            "MAX_LOSS": "1e9",
            "OLD_POLICY": "logged",
            "STEPS_PER_ROUND": "1",
        }
        environ = os.environ | {"TRAINSPAN_HOME": temporary, "TRAINSPAN_LOG": "info"}
        environ |= {f"TRAINSPAN_TRAIN__{name}": value for name, value in limits.items()}
        began = time.monotonic()
        command = [sys.executable, "-m", "trainspan_cli", "train", "--model", str(model), "--policy-url", "none"]
        command += ["--learning-rate", "1e-6", "--format", "json"]
        running = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, log = running.communicate()
        seconds = time.monotonic() - began
        usage = resources()
    assert running.returncode == 0, log
    (event,) = [event for event in map(parse, out.splitlines()) if isinstance(event, RoundTrained)]
    assert event.error is None, event
    chosen = re.search(r"micro_batch_tokens=(\d+) \((.*?)\): about ([\d.]+) GiB \((.*)\), ([\d.]+) GiB are free", log)
    assert chosen, log
    return {
        "model": model.name,
        "micro_batch_tokens": int(chosen[1]),
        "how": chosen[2],
        "estimated_gib": float(chosen[3]),
        "estimate": chosen[4],
        "free_gib": float(chosen[5]),
        "peak_gib": usage,
        "micro_batches": {"count": event.micro_batches, "tokens": event.micro_batch_tokens},
        "tokens": {"trained": event.trained_tokens, "forwarded": event.forwarded_tokens},
        "stages_s": event.seconds,
        "seconds": round(seconds, 1),
    }


def resources() -> float:
    """The peak memory of a child, in GiB."""
    import resource

    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2)
