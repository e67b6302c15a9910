"""What viewers cost the intake: the same burst of spans with and without two browsers that look at Live and at a run.

A copy of the large store of benchmarks/viewer/viewer.py takes spans from 4 connections for some seconds; then everything must be in
DuckDB. Bursts with and without viewers take turns, and figures are compared in pairs, so that other work on the machine hits
both. Each browser asks for Live and for the run's page every 3 s, as their script does. `TRAINSPAN_BENCH_PAIRS` sets the number
of pairs.
"""

import http.client
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.collector.collector import burst, count_spans
from benchmarks.support.cpu_time import tree_cpu_s
from benchmarks.support.export_requests import SPANS_PER_REQUEST
from benchmarks.support.pairs import summary
from benchmarks.support.viewer_process import Served, collector, viewer
from benchmarks.support.viewer_world import BenchWorld
from benchmarks.viewer.viewer import made_world
from trainspan_schemas.store.access import StoreAddress, running_collector

__all__ = ["measure"]

_BURST_S: Final = 9.0
_PAIRS: Final = 6
_BROWSERS: Final = 2
_EVERY_S: Final = 3.0


def measure() -> dict[str, Any]:
    """Figures without viewers, and the ratios of those with viewers to them, as medians of pairs."""
    made = made_world()
    pairs = int(os.environ.get("TRAINSPAN_BENCH_PAIRS", _PAIRS))
    folder = made.home.with_name(f"{made.home.name}-ingest-{os.getpid()}")
    folder.mkdir()
    try:
        store = folder / "spans.duckdb"
        for name in ("", ".wal"):
            if Path(f"{made.store}{name}").exists():
                shutil.copyfile(f"{made.store}{name}", f"{store}{name}")
        shutil.copytree(f"{made.store}.keys", f"{store}.keys")
        Path(f"{store}.journal").mkdir(mode=0o700)
        return _measure(made, store, pairs)
    finally:
        shutil.rmtree(folder)


def _measure(made: BenchWorld, store: Path, pairs: int) -> dict[str, Any]:
    load = [os.getloadavg()[0]]
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with collector(store) as pid, viewer(made.home, store, pid) as served:
        address = running_collector(store)
        assert address is not None
        _turn(address, pid, None, made)  # warms up
        for number in range(pairs):
            for is_viewed in (False, True) if number % 2 else (True, False):
                found[is_viewed].append(_turn(address, pid, served if is_viewed else None, made))
        peaks = served.peaks_mib()
    load.append(os.getloadavg()[0])
    names = list(found[False][0])
    return {
        **{name: round(sorted(turn[name] for turn in found[False])[pairs // 2], 1) for name in names},
        **{
            f"{name}_with_viewers_to_without": summary(
                [now[name] / before[name] for now, before in zip(found[True], found[False], strict=True)], 3
            )
            for name in names
        },
        **peaks,
        "pairs": pairs,
        "load_average": [round(one, 1) for one in load],
    }


def _turn(address: StoreAddress, pid: int, served: Served | None, made: BenchWorld) -> dict[str, float]:
    """One burst, until it is loaded. The collector's CPU includes what the pages read from it."""
    before, cpu_before, began = count_spans(address, wait_ms=600_000), tree_cpu_s(pid), time.monotonic()
    with ExitStack() as stack:
        if served is not None:
            stack.enter_context(_browsers(served, made))
        seconds = sorted(burst(address, _BURST_S))
        sent = len(seconds) * SPANS_PER_REQUEST
        took_s = time.monotonic() - began
        loaded = count_spans(address, wait_ms=600_000) - before
        loaded_s = time.monotonic() - began
    if loaded != sent:
        raise RuntimeError(f"{sent} spans were acknowledged, and {loaded} are stored")
    return {
        "acknowledged_spans_per_s": sent / took_s,
        "loaded_spans_per_s": sent / loaded_s,
        "spans_per_collector_cpu_s": sent / (tree_cpu_s(pid) - cpu_before),
        "ack_p99_ms": 1000 * seconds[int(len(seconds) * 0.99)],
    }


@contextmanager
def _browsers(served: Served, made: BenchWorld) -> Iterator[None]:
    """Two browsers, each with Live and a run's page open."""
    ended = threading.Event()

    def look(path: str, after_s: float) -> None:
        tag = ""
        due = time.monotonic() + after_s
        while not ended.wait(max(0.0, due - time.monotonic())):
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
            headers = {"Authorization": f"Bearer {served.token}"} | ({"If-None-Match": tag} if tag else {})
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            tag = answer.headers.get("etag", "")
            connection.close()
            due = time.monotonic() + _EVERY_S  # the script waits after each answer

    paths = [path for _ in range(_BROWSERS) for path in ("/live", f"/runs/{made.run}")]
    threads = [threading.Thread(target=look, args=(path, 0.7 * place)) for place, path in enumerate(paths)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
