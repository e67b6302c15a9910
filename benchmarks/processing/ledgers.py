"""What the number of earlier datasets costs the build of one more: reading their ledgers, and naming them in the manifest."""

import json
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import polars as pl

from trainspan_processing.dataset.ledger import LEDGER, Earlier, read_ledger, write_ledger
from trainspan_schemas.artifacts.dataset import about_dir, dataset_dir, dataset_dirs

ROUNDS: Final = (10, 100, 1_000, 10_000)
ROLLOUTS: Final = 64
"""Of a round."""
DIGEST: Final = "0123456789abcdef"
_BUILDS: Final = 64
"""As many as between two summaries."""


def measure() -> dict[str, Any]:
    """CPU seconds of that part of a build, for each number of earlier datasets, over 64 builds in a row; bytes in its manifest."""
    found: dict[str, Any] = {}
    out = Path(tempfile.mkdtemp(prefix="trainspan-bench-"))
    try:
        published = 0
        for rounds in ROUNDS:
            for number in range(published, rounds):
                _publish(out, number)
            read_ledger(out)  # in a run, the summary is at most 63 rounds old
            cpu_s, written = [], ""
            for number in range(rounds, rounds + _BUILDS):
                began = time.process_time()
                ledger = read_ledger(out)
                history = ledger.history(DIGEST)
                written = json.dumps(asdict(Earlier.of(ledger.files)))
                cpu_s.append(time.process_time() - began)
                assert history.rollouts == ledger.rows.height == number * ROLLOUTS
                _publish(out, number)
            published = rounds + _BUILDS
            found[f"build_cpu_s_{rounds}"] = round(median(cpu_s), 3)
            found[f"longest_build_cpu_s_{rounds}"] = round(max(cpu_s), 3)
            found[f"manifest_bytes_{rounds}"] = len(written)
            began = time.process_time()
            read_ledger(out, only=dataset_dirs(out))
            found[f"without_summary_cpu_s_{rounds}"] = round(time.process_time() - began, 3)
    finally:
        shutil.rmtree(out)
    return found


def _publish(out: Path, number: int) -> None:
    """A dataset of ROLLOUTS rollouts, without rows."""
    folder = _folder_of(out, number)
    folder.mkdir()
    about = about_dir(folder)
    about.mkdir()
    lines = [
        {
            "rollout_id": f"{number:016x}{rollout:016x}",
            "attempt": 0,
            "run_id": "20260101-000000-01234567",
            "round": number,
            "task_id": f"task-{rollout // 8}",
            "reward": float(rollout % 2),
            "reward_digest": DIGEST,
            "end_ns": 1_700_000_000_000_000_000 + number * 1_000_000_000 + rollout,
            "calls": 3,
            "kept": 3,
            "evaluations": 1,
            "rewards": 1,
        }
        for rollout in range(ROLLOUTS)
    ]
    write_ledger(about, pl.DataFrame(lines, schema=LEDGER))


def _folder_of(out: Path, number: int) -> Path:
    """Like `dataset_dir`, without a look at all folders."""
    return out / dataset_dir(Path("none"), number).name
