"""A dataset from four stores, in one process and on Ray with one and two workers: seconds, CPU time and peak memory of each process.

The stores hold copies of the same 256 rollouts (support/large_store.py). Collectors, driver, workers and Ray's own processes
share two cores, so one worker already has more than one at work. One worker is therefore run on one core too: twice as many
workers on twice as many cores should take half as long. TRAINSPAN_BENCH_CALLS sets the number of calls, and
TRAINSPAN_BENCH_TOKENS the tokens of an answer: with 100, a prompt has about 500.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.cpu_time import cpu_s, peak_kib, tree_cpu_s
from benchmarks.support.large_store import CALLS_PER_COPY, Lengths, Shape, fill
from tests.support.agents.programs import environment
from tests.support.collector.process import running
from tests.support.ray_cluster import RayCluster

__all__ = ["measure"]

_STORES = 4
_RUN = "bench"
_EVERY_S = 0.2
_LIMIT_S = 1_500.0


def measure() -> dict[str, Any]:
    """Figures of the three runs, whose bytes must be equal."""
    calls = int(os.environ.get("TRAINSPAN_BENCH_CALLS", "10000000"))
    lengths = Lengths.of(int(os.environ.get("TRAINSPAN_BENCH_TOKENS", "100")))
    copies = max(1, round(calls / CALLS_PER_COPY / _STORES))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stores = [root / str(number) / "spans.duckdb" for number in range(_STORES)]
        for number, store in enumerate(stores):
            fill(store, _RUN, Shape(1, copies, 8, 0, lengths), number * copies)
        with contextlib.ExitStack() as stack:
            # They start before anything is measured.
            started = [stack.enter_context(running(store, "--http", "off")) for store in stores]
            collectors = [collector.process.pid for collector in started]
            with _cores(2, collectors):
                runs = {"one_process": _run(root, stores, collectors, "one_process", None)}
            for name, workers, cores in (("ray_2", 2, 2), ("ray_1_on_one_core", 1, 1), ("ray_1", 1, 2)):
                with _cores(cores, collectors), RayCluster(cpus=workers) as cluster:
                    runs[name] = _run(root, stores, collectors, name, cluster)
    digests = {name: figures.pop("digest") for name, figures in runs.items()}
    if len(set(digests.values())) != 1:
        raise RuntimeError(f"the bytes differ: {digests}")
    return {
        "stores": _STORES,
        **{f"{name}_{key}": value for name, figures in runs.items() for key, value in figures.items()},
        "speedup_of_2_workers": round(runs["ray_1"]["s"] / runs["ray_2"]["s"], 2),
        "speedup_of_2_workers_and_cores": round(runs["ray_1_on_one_core"]["s"] / runs["ray_2"]["s"], 2),
        "load_average": os.getloadavg()[0],
    }


@contextlib.contextmanager
def _cores(number: int, processes: list[int]) -> Iterator[None]:
    """Only this number of cores for these processes, and for those that this one starts meanwhile."""
    cores = os.sched_getaffinity(0)
    try:
        _pin([os.getpid(), *processes], set(sorted(cores)[:number]))
        yield
    finally:
        _pin([os.getpid(), *processes], cores)


def _pin(processes: list[int], cores: set[int]) -> None:
    for process in processes:
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(task.name), cores)


def _run(
    root: Path, stores: list[Path], collectors: list[int], name: str, cluster: RayCluster | None
) -> dict[str, Any]:
    """One run of the command, on the cluster if there is one."""
    named = [option for store in stores for option in ("--store", str(store))]
    command = [sys.executable, "-m", "trainspan_cli", "dataset", *named, "--out", str(root / name), "--run", _RUN]
    own = {"TRAINSPAN_HOME": str(root / "home")}
    if cluster is not None:
        command += ["--engine", "ray"]
        own |= {"TRAINSPAN_RAY__ADDRESS": cluster.address}
    reads_before_s = sum(map(tree_cpu_s, collectors))
    began_s = time.monotonic()
    process = subprocess.Popen(
        [*command, "--format", "json"],
        env=environment(own),
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = _Watch(process.pid)
    output, errors = process.communicate(timeout=_LIMIT_S)
    wall_s = time.monotonic() - began_s
    watch.stop()
    if process.returncode != 0:
        raise RuntimeError(f"the command failed: {errors[-2000:]}")
    manifest = json.loads(output.splitlines()[-1])
    reads_s = sum(map(tree_cpu_s, collectors)) - reads_before_s
    tokens = manifest["tokens"]["prompt"] + manifest["tokens"]["completion"]
    return {
        "digest": hashlib.sha256(json.dumps(manifest["files"]).encode()).hexdigest(),
        "s": round(wall_s, 1),
        "calls_kept": manifest["calls_kept"],
        "tokens_per_call": round(tokens / manifest["calls_kept"]),
        "files": len(manifest["files"]),
        "command_cpu_s": round(watch.command_cpu_s, 1),
        "command_peak_mib": round(watch.command_peak_mib),
        "workers_cpu_s": round(sum(watch.worker_cpu_s.values()), 1),
        "workers_peak_mib": [round(peak) for peak in sorted(watch.worker_peak_mib.values())],
        "collectors_cpu_s": round(reads_s, 1),
    }


class _Watch:
    """Samples the command and Ray's workers that run its tasks, until it is stopped."""

    def __init__(self, command: int) -> None:
        self.command_cpu_s, self.command_peak_mib = 0.0, 0.0
        self.worker_cpu_s: dict[int, float] = {}
        self.worker_peak_mib: dict[int, float] = {}
        self._command, self._ended = command, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_EVERY_S):
            with contextlib.suppress(OSError, IndexError):  # it has ended
                self.command_cpu_s, self.command_peak_mib = cpu_s(self._command), peak_kib(self._command) / 1024
            for folder in Path("/proc").iterdir():
                with contextlib.suppress(OSError, IndexError):
                    if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(b"ray::_apply"):
                        pid = int(folder.name)
                        self.worker_cpu_s[pid], self.worker_peak_mib[pid] = cpu_s(pid), peak_kib(pid) / 1024
