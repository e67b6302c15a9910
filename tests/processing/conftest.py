"""A real collector per test session, and datasets built from it."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.processing.support.traces import SECOND, START_NS, TestRollout, send
from tests.support.collector.process import remember
from tests.support.places import ROOT
from trainspan_processing.assembly.build import BuildRequest, BuiltDataset, Pages, build_dataset
from trainspan_processing.dataset.ledger import read_ledger
from trainspan_processing.dataset.published import open_published
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.rewards.evaluation_rewards import bind_rewards
from trainspan_processing.traces.trace_index import Clock, TraceIndex, index_traces
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.files.objects import Objects
from trainspan_schemas.store.access import running_collector

_numbers = itertools.count()


class RunningCollector:
    """`trainspan collector` on free ports."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "spans.duckdb"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "trainspan_cli", "collector", "--store", str(self.store)),
                *("--grpc", "127.0.0.1:0", "--http", "off", "--flight", "127.0.0.1:0"),
            ],
            env={
                **os.environ,
                "TRAINSPAN_HOME": str(folder / "home"),
                "TRAINSPAN_COLLECTOR__LOAD_INTERVAL_S": "0.02",
            },
            stdout=subprocess.DEVNULL,
        )

    def wait(self) -> "RunningCollector":
        deadline = time.monotonic() + 60
        while (address := running_collector(self.store)) is None:
            assert self._process.poll() is None, "the collector ended"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert address.grpc is not None
        remember(address)
        self.grpc = address.grpc
        return self

    def send(self, rollouts: Sequence[TestRollout]) -> None:
        send(self.grpc, rollouts)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


@pytest.fixture(scope="session")
def collectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningCollector]]:
    """Three collectors, each with its own store."""
    running = [RunningCollector(tmp_path_factory.mktemp(f"store{number}")) for number in range(3)]
    try:
        yield [collector.wait() for collector in running]
    finally:
        for collector in running:
            collector.stop()


@pytest.fixture
def run_id() -> str:
    """A separate run for each test, so that tests can share the stores."""
    return f"run-{next(_numbers)}"


def check_drops(built: BuiltDataset) -> None:
    """The ledger says of every call that the manifest counts as dropped whose it is, except those that are still arriving."""
    counted: Counter[str] = Counter()
    for text in open_published(built.path).ledger()["dropped"].drop_nulls():
        counted.update(json.loads(text))
    if built.manifest["pending"]["rollouts"] == 0:
        assert counted == built.manifest["dropped"]
    assert counted <= Counter(built.manifest["dropped"])


class Bench:
    """Sends rollouts to a store and builds datasets of one run."""

    def __init__(self, collectors: list[RunningCollector], run_id: str, out: Path) -> None:
        self.collectors, self.run_id, self.out = collectors, run_id, out
        self.now = START_NS + 10_000 * SECOND
        self.slept: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None

    def rollout(self, name: str, **more: Any) -> TestRollout:
        return TestRollout(f"{self.run_id}-{name}", run=self.run_id, **more)

    def send(self, *rollouts: TestRollout, store: int = 0) -> None:
        self.collectors[store].send(rollouts)

    def build(
        self,
        *,
        stores: Sequence[int] = (0,),
        every_run: bool = False,
        round_: int | None = None,
        since_round: int | None = None,
        number: int | None = None,
        out: Path | None = None,
        pages: Pages | None = None,
        **settings: Any,
    ) -> BuiltDataset:
        request = BuildRequest(
            stores=[str(self.collectors[number].store) for number in stores],
            out=out or self.out,
            settings=dataclasses.replace(DatasetSettings(), **settings),
            run_id=None if every_run else self.run_id,
            round=round_,
            since_round=since_round,
            number=number,
        )
        built = build_dataset(request, self.clock, pages)
        check_drops(built)
        return built

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, self._sleep)

    def source(self) -> Source:
        """The first store."""
        return Source([str(self.collectors[0].store)])

    def traces(self) -> TraceIndex:
        """The first pass's view of the run in the first store."""
        with self.source() as source:
            ledger = read_ledger(self.out)
            return index_traces(source, Selection(self.run_id), ledger, now_ns=self.now, settle_s=60.0)

    def edges(self) -> list[tuple[str, str, int | None, float]]:
        """(rollout, rule, call index or None for the rollout, score) of each reward, sorted."""
        traces = self.traces()
        bound = bind_rewards(
            traces.evaluations, traces.calls, traces.spans, traces.matches, traces.rollouts, ["reward"]
        )
        index = {row[:2]: row[2] for row in traces.calls.select("trace_id", "span_id", "call_index").iter_rows()}
        found = [
            (rollout.removeprefix(f"{self.run_id}-"), rule, index.get((trace_id, span_id)), score)
            for rollout, rule, trace_id, span_id, score in bound.edges.select(
                "rollout_id", "rule", "call_trace_id", "call_span_id", "score"
            ).iter_rows()
        ]
        return sorted(found, key=lambda edge: (edge[0], -1 if edge[2] is None else edge[2], edge[3]))

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += int(seconds * SECOND)
        self.on_sleep()


@pytest.fixture
def bench(collectors: list[RunningCollector], run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))  # not that of somebody's `make demo`
    return Bench(collectors, run_id, tmp_path / "dataset")


def rows(built: BuiltDataset) -> pl.DataFrame:
    """The dataset's rows."""
    return pl.concat([pl.read_parquet(built.path / file["name"]) for file in built.manifest["files"]])


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place of datasets in this process's memory."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    name = f"memory://{uuid.uuid4().hex}/datasets"
    yield name
    Objects(name).remove("")


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Runs a program with the packages of constraints/exports.txt before those installed here; returns its output."""
    site = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
    pins = ROOT / "constraints" / "exports.txt"
    subprocess.run([*install, "--target", str(site), "-r", str(pins)], check=True, timeout=280, capture_output=True)

    def run(program: str) -> str:
        environ = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
