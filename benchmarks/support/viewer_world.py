"""A state folder as after weeks of work: a store of a million calls, a dataset of 100,000 rows, many runs and datasets.

It is kept, since making it takes minutes: in `$TRAINSPAN_BENCH_FOLDER`, else in the user's cache, under a name that depends on
the code here. Remove the folder by hand when it is no longer needed (about 3 GB).
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

import benchmarks.support.large_store
from benchmarks.support.large_store import Shape, fill
from tests.support.models.byte_tokenizer import make_byte_tokenizer
from trainspan_schemas.artifacts.dataset import DATASET_VERSION, about_dir, manifest_path, round_dir_name
from trainspan_schemas.artifacts.trained_tokens import METADATA, VERSION, part_name, tokens_dir
from trainspan_schemas.config.settings import Settings

__all__ = ["BenchWorld", "kept_folder", "world"]

RUN: Final = "20260102-030405-0a1b2c3d"
_DATASET_ROUND: Final = 5
_ROUNDS: Final = 500
"""Of the run, as its records say."""
_OTHER_RUNS: Final = 60
_OTHER_DATASETS: Final = 200
_CHECKS: Final = (
    "every call is stored",
    "no acknowledged span is missing",
    "ids and logprobs have equal length",
    "every drop is named",
    "rewards are those of the runner",
    "server and trainer agree",
    "the swap is fresh",
    "rounds train the policy",
)


@dataclass(frozen=True, slots=True)
class BenchWorld:
    """Where it is, and what is in it."""

    home: Path
    """TRAINSPAN_HOME."""
    calls: int
    """Of the store."""

    @property
    def store(self) -> Path:
        return self.home / "spans.duckdb"

    @property
    def run(self) -> str:
        return RUN

    @property
    def dataset(self) -> str:
        """The name of the large dataset."""
        return f"{RUN}:{round_dir_name(_DATASET_ROUND)}"

    @property
    def dataset_path(self) -> Path:
        return self.home / "runs" / RUN / "dataset" / round_dir_name(_DATASET_ROUND)


def kept_folder() -> Path:
    """The folder of large things that several runs of the measurements share."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TRAINSPAN_BENCH_FOLDER") or Path(cache) / "trainspan-bench")


def world(shape: Shape) -> BenchWorld:
    """The world of this shape, made if it is not there."""
    code = b"".join(Path(str(file)).read_bytes() for file in (__file__, benchmarks.support.large_store.__file__))
    key = hashlib.sha256(code + repr((shape, DATASET_VERSION, sys.version_info[:2])).encode()).hexdigest()[:12]
    target = kept_folder() / f"viewer-{key}"
    kept_folder().mkdir(parents=True, exist_ok=True)
    with _alone_in(kept_folder()):
        if not (target / "world.json").exists():
            shutil.rmtree(target, ignore_errors=True)
            _make(target, shape)
    return BenchWorld(target, json.loads((target / "world.json").read_text())["calls"])


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(home: Path, shape: Shape) -> None:
    """The dataset keeps the path of its store, so everything is made in place; the file `world.json` comes last."""
    home.mkdir(parents=True)
    tokenizer = home / "tokenizer"
    tokenizer.mkdir()
    make_byte_tokenizer(tokenizer)
    calls = fill(home / "spans.duckdb", RUN, shape)
    for number in range(_OTHER_RUNS):
        _write_run(home / "runs" / f"202601{number % 28 + 1:02d}-{number:06d}-{number:08x}", 20 + number, tokenizer)
    _write_run(home / "runs" / RUN, _ROUNDS, tokenizer)
    made = BenchWorld(home, calls)
    subprocess.run(
        [
            *(sys.executable, "-m", "trainspan_cli", "dataset", "--store", str(made.store)),
            *("--out", str(made.dataset_path.parent), "--run", RUN, "--round", str(_DATASET_ROUND), "--format", "json"),
        ],
        env={**os.environ, "TRAINSPAN_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    for number in range(1000, 1000 + _OTHER_DATASETS):
        other = made.dataset_path.with_name(round_dir_name(number))
        for source, target in ((made.dataset_path, other), (about_dir(made.dataset_path), about_dir(other))):
            shutil.copytree(source, target, copy_function=os.link)
    _write_figures(made)
    (home / "world.json").write_text(json.dumps({"calls": calls, "shape": asdict(shape)}))


def _write_run(folder: Path, rounds: int, tokenizer: Path) -> None:
    """A finished run with records of the size that the loop writes."""
    settings = json.loads(json.dumps(asdict(Settings()), default=str))
    settings["loop"] |= {"target": "agent.py:solve", "rounds": rounds}
    settings["serving"] |= {"model": str(tokenizer)}
    (folder / "checkpoints").mkdir(parents=True)
    best = {"checkpoint": f"best/policy-{rounds:06d}", "round": rounds, "policy_version": rounds, **_estimate(0.9)}
    run = {"run_id": folder.name, "status": "finished", "settings": settings, "best": best}
    (folder / "run.json").write_text(json.dumps(run))
    records = [_validation(0)]
    for number in range(1, rounds + 1):
        records.append(_round(number))
        if number % 5 == 0:
            records.append(_validation(number))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = [{"round": number, "version": number, **_figures(number)} for number in range(1, rounds + 1)]
    (folder / "checkpoints" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _estimate(mean: float) -> dict[str, Any]:
    return {"n": 300, "mean": mean, "deviation": 0.4, "binary": True}


def _checks(round_: int) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "ok": (round_ + place) % 97 != 0,
            "detail": f"server {round_}, clients {round_}, store {round_}, " * 2,
        }
        for place, name in enumerate(_CHECKS)
    ]


def _validation(round_: int) -> dict[str, Any]:
    about = {"kind": "eval", "name": "validation", "round": round_, "policy_version": round_, "tasks": 300}
    figures = {"status": {"ok": 300}, "calls": 526, "seconds": 74.5, "checks": _checks(round_)[:3]}
    return {**about, **_estimate(1 - math.exp(-(round_ + 5) / 100)), **figures}


def _figures(round_: int) -> dict[str, Any]:
    some = (
        "kl",
        "k3",
        "k1",
        "loss",
        "grad_norm",
        "logp_diff_mean",
        "logp_diff_max",
        "clip_low",
        "clip_high",
        "reward_std",
    )
    return {"entropy": 1.5 / round_, "reward_mean": 0.5, **dict.fromkeys(some, 0.01 + 0.0001 * round_)}


def _round(round_: int) -> dict[str, Any]:
    seconds = dict.fromkeys(
        ("wait", "replay", "read", "plan", "canary", "old", "optimizer", "train", "save", "swap"), 1.5
    )
    agreement = {"mean": 1e-5, "k3": 7e-11, "limit": 3e-5, "fresh": True, "server_dtype": "float32"}
    return {
        "kind": "round",
        "round": round_,
        "policy_version": round_,
        "skipped": None,
        "rollout": {
            "total": 128,
            "status": {"ok": 127, "timeout": 1},
            "mean_reward": 1 - math.exp(-round_ / 100),
            "sampled_tokens": 3685,
            "sampling_seconds": 33.8,
        },
        "dataset": {"rows": 43, "calls_seen": 222, "calls_kept": 43, "dropped": {"zero_spread_group": 179}},
        "train": {"version": round_, **_figures(round_), "agreement": agreement, "seconds": seconds, "error": None},
        "seconds": {"rollouts": 34.2, "dataset": 1.6, "train": 38.2, "total": 74.5},
        "checks": _checks(round_),
    }


def _write_figures(made: BenchWorld) -> None:
    """The trainer's figures at every token of the dataset, as two processes write them."""
    checkpoints, name = made.home / "runs" / RUN / "checkpoints", f"policy-{_DATASET_ROUND:06d}"
    digest = hashlib.sha256(manifest_path(made.dataset_path).read_bytes()).hexdigest()
    (checkpoints / name).mkdir()
    (checkpoints / name / "trainspan.json").write_text(json.dumps({"dataset_sha256": digest}))
    folder = tokens_dir(checkpoints, name)
    folder.mkdir(parents=True)
    names = ["rollout_id", "attempt", "call_index", "trace_id", "span_id"]
    files = sorted(made.dataset_path.glob("*.parquet"))
    rows = pl.concat([pl.read_parquet(file, columns=[*names, "logprobs"]) for file in files]).with_row_index("row")
    about = {"version": VERSION, "checkpoint": name, "clip": [0.8, 1.25], "steps": 2, "ratio": "token", "left_out": {}}
    for rank in range(2):
        part = rows.slice(rank * (rows.height // 2), rows.height - rows.height // 2)
        logprobs = part["logprobs"].to_arrow().cast(pa.list_(pa.float32()))
        flat = np.asarray(logprobs.flatten())
        lists = [_like(logprobs, values) for values in (flat + 1e-5, -flat, np.exp(flat / 9))]
        clipped = _like(logprobs, np.where(flat < -0.9, -1, 0).astype(np.int8))
        columns = {"row": part["row"].cast(pl.Int64).to_arrow(), **{key: part[key].to_arrow() for key in names}}
        columns["step"] = pa.array(np.full(part.height, 1, np.int32))
        columns |= {"trainer_logprobs": lists[0], "old_logprobs": pa.nulls(part.height, pa.list_(pa.float32()))}
        columns |= {"entropies": lists[1], "ratios": lists[2], "clipped": clipped}
        table = pa.table(columns).replace_schema_metadata({METADATA: json.dumps(about)})
        pq.write_table(table, folder / part_name(rank, 2), compression="zstd", row_group_size=2500)


def _like(lists: pa.ListArray, values: "np.typing.NDArray[Any]") -> pa.ListArray:
    """Lists of the same lengths with other values."""
    lengths = np.asarray(lists.value_lengths())
    return pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int32()), pa.array(values))
