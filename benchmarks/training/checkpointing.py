"""A round of a model of 135 million weights by stage: seconds, and the peak memory of a process.

Weights are random, in the shape of SmolLM2-135M, or those in the folder of TRAINSPAN_BENCH_MODEL. Every round has 4 short
rollouts, so that the fixed cost of a round is measured, not training. It runs in one process and in two that split the
weights. A policy server waits for `save`.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.support.workload import Workload
from tests.support.dataset_files import write_dataset
from tests.support.models.tiny_model import make_tiny_model
from tests.training.support.processes.pair import FSDP

__all__ = ["measure"]

WORK = Workload(groups=2, group=2, turns=1, prompt=40, sampled=16, observed=0)
ROUNDS = 3
"""The first one creates Adam's state and does not count."""


def measure() -> dict[str, Any]:
    """Medians over the rounds after the first; seconds are wall time, by the names of `metrics.jsonl`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = Path(os.environ.get("TRAINSPAN_BENCH_MODEL") or make_model(folder / "model"))
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        for round_ in range(ROUNDS):
            write_dataset(folder / "dataset", WORK.calls(vocabulary, round_), round_=round_)
        figures: dict[str, Any] = {"model": model.name}
        figures["one_process"] = run(folder, model, folder / "one", 1)
        figures["two_processes_split"] = run(folder, model, folder / "two", 2)
    return figures


def run(folder: Path, model: Path, checkpoints: Path, processes: int) -> dict[str, Any]:
    """Runs `trainspan train --follow` over all datasets in `processes` processes (gloo)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "trainspan_cli",
        "train",
        "--model",
        str(model),
        "--policy-url",
        "none",
        "--follow",
    ]
    command += ["--dataset", str(folder / "dataset"), "--checkpoints", str(checkpoints), "--rounds", str(ROUNDS)]
    limits = {"MAX_KL": "1e9", "MAX_RATIO": "1e9", "OLD_POLICY": "logged", "MICRO_BATCH_TOKENS": "2048"}
    limits |= {"LEARNING_RATE": "1e-6", "STEPS_PER_ROUND": "1"}
    environ = os.environ | {"TRAINSPAN_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    environ |= {f"TRAINSPAN_TRAIN__{name}": value for name, value in limits.items()}
    if processes > 1:
        environ |= FSDP | {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = [
        subprocess.Popen(
            [*command, "--format", "json"],
            env=environ | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    began, events, times = time.monotonic(), [], []
    assert running[0].stdout is not None
    for line in running[0].stdout:
        times.append(time.monotonic())
        events.append(json.loads(line))
    statuses = [os.wait4(process.pid, 0) for process in running]
    for process, (_, status, _) in zip(running, statuses, strict=True):
        process.returncode = os.waitstatus_to_exitcode(status)
    assert all(process.returncode == 0 for process in running), [process.returncode for process in running]
    rounds = [event["seconds"] for event in events if event["event"] == "round"][1:]
    errors = [event["error"] for event in events if event.get("error")]
    assert not errors, errors
    figures = {
        "start_s": round(times[0] - began, 2),
        "round_s": round(statistics.median(b - a for a, b in pairwise(times[1:])), 2),
        "stages_s": {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]},
        "end_s": round(time.monotonic() - times[-1], 2),
        "peak_gib": [round(usage.ru_maxrss / 2**20, 2) for _, _, usage in statuses],
    }
    print(json.dumps(figures), file=sys.stderr)
    return figures


def make_model(folder: Path) -> Path:
    """Creates a model with random weights and the tokenizer of the tests' tiny model: nothing is tokenized."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tiny_model(folder, hidden=32)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder
