"""Memory of reading a dataset: one process, and each of two that train together (gloo).

32 rollouts of 100 turns, 8 of each task: 1.9 million tokens, 96 million as whole prompts with their answers. Figures are MiB
allocated by Python, NumPy and Arrow, by their own counts: the peak until micro-batches are built, and the rest afterwards.
"""

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

from trainspan_schemas.artifacts.dataset import DATASET_VERSION, MANIFEST, about_dir
from trainspan_schemas.config.settings import TrainSettings

__all__ = ["measure"]

TASKS, GROUP, TURNS = 4, 8, 100
PROMPT, SAMPLED, OBSERVED = 400, 100, 500


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        dataset = write(Path(temporary))
        return {
            "rollouts": TASKS * GROUP,
            "turns": TURNS,
            "parquet_mib": round(sum(file.stat().st_size for file in dataset.iterdir()) / 2**20, 1),
            "one_process": _start(dataset, 1)[0],
            "of_two_processes": _start(dataset, 2),
        }


def write(root: Path) -> Path:
    """Writes the dataset one rollout at a time: all prompts together would not fit."""
    import hashlib

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = root / "round-0000"
    folder.mkdir()
    about_dir(folder).mkdir()
    part = folder / "part-0000.parquet"
    rng = np.random.default_rng(0)
    schema = pa.schema(
        [
            ("rollout_id", pa.string()),
            ("attempt", pa.int32()),
            ("group_id", pa.string()),
            ("policy_version", pa.int32()),
        ]
        + [(name, pa.int32()) for name in ("call_index", "segment_id", "segment_pos")]
        + [(name, pa.list_(pa.int32())) for name in ("prompt_ids", "completion_ids")]
        + [("logprobs", pa.list_(pa.float32())), ("temperature", pa.float64()), ("advantage", pa.float64())]
    )
    with pq.ParquetWriter(part, schema, compression="zstd") as file:
        for rollout in range(TASKS * GROUP):
            if rollout % GROUP == 0:
                task = rng.integers(3, 49_152, PROMPT, dtype=np.int32)
            length = PROMPT + TURNS * SAMPLED + (TURNS - 1) * OBSERVED
            tokens = np.concatenate([task, rng.integers(3, 49_152, length - PROMPT, dtype=np.int32)])
            ends = PROMPT + np.arange(TURNS) * (SAMPLED + OBSERVED)
            turns = np.arange(TURNS, dtype=np.int32)
            columns = {
                "rollout_id": [f"rollout-{rollout:04d}"] * TURNS,
                "attempt": [0] * TURNS,
                "group_id": [f"task-{rollout // GROUP}"] * TURNS,
                "policy_version": [0] * TURNS,
                "call_index": turns,
                "segment_id": [0] * TURNS,
                "segment_pos": turns,
                "prompt_ids": [tokens[:end] for end in ends],
                "completion_ids": [tokens[end : end + SAMPLED] for end in ends],
                "logprobs": [np.full(SAMPLED, -5.7, dtype=np.float32)] * TURNS,
                "temperature": [1.0] * TURNS,
                "advantage": [float(rng.normal())] * TURNS,
            }
            file.write_table(pa.table(columns, schema=schema))
    manifest = {
        "version": DATASET_VERSION,
        "round": 0,
        "rows": TASKS * GROUP * TURNS,
        "rollouts": TASKS * GROUP,
        "files": [{"name": part.name, "sha256": hashlib.sha256(part.read_bytes()).hexdigest()}],
    }
    (about_dir(folder) / MANIFEST).write_text(json.dumps(manifest))
    return folder


def _start(dataset: Path, processes: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    team = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if processes > 1 else {}
    program = f"from benchmarks.training.reading import read; read({str(dataset)!r})"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | team | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    outs = [process.communicate()[0] for process in running]
    assert not any(process.returncode for process in running)
    return [json.loads(out) for out in outs]


def read(dataset: str) -> None:
    """Reads a dataset as a trainer does before its first forward pass, in this process of the team in the environment."""
    import pyarrow as pa
    from transformers import LlamaConfig

    from trainspan_training.checkpoints.lineage import Lineage
    from trainspan_training.constraints.replay import Replayer
    from trainspan_training.data.dataset import open_dataset, read_calls
    from trainspan_training.data.layout import batch_layout
    from trainspan_training.data.loss_weights import find_rule
    from trainspan_training.devices.team import Team
    from trainspan_training.model.starting_policy import Policy
    from trainspan_training.rounds.reading import RoundReading

    config = LlamaConfig(vocab_size=49_152, hidden_size=576, intermediate_size=1536, max_position_embeddings=2**17)
    settings = TrainSettings(micro_batch_tokens=2**16, forward="packed")
    team = Team.join()
    team.gather(None)
    folder = open_dataset(Path(dataset))
    layout = batch_layout(settings, config, cuda=False, processes=team.size)
    read_calls(folder, only=frozenset([0]))  # warms up imports and caches
    replayer = Replayer(config.vocab_size, bytes)  # no call is constrained
    made: list[Any] = []

    def work() -> None:
        reading = RoundReading(folder, Policy(Path(), None, "base", 0, Path()), settings, team, replayer, Lineage({}))
        reading.replay()
        reading.read()
        made.extend(reading.build_steps(reading.plan(config, layout, find_rule(settings))))

    default, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    tracemalloc.start()
    work()
    gc.collect()
    stays, most = tracemalloc.get_traced_memory()
    pa.set_memory_pool(default)
    figures = {
        "peak_mib": round((most + counted.max_memory()) / 2**20, 1),
        "stays_mib": round((stays + counted.bytes_allocated()) / 2**20, 1),
        "forwarded_tokens": sum(batch.n_tokens for step in made for batch in step.micro_batches),
    }
    team.finish()
    team.leave()
    print(json.dumps(figures))
