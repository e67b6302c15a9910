"""Two collectors, one of which is killed under load: nothing is lost, nothing is there twice, and a dataset does not change."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from tests.processing.support.traces import TestRollout
from tests.support.collector.process import CollectorProcess, select
from tests.support.ports import free_port
from trainspan_processing.assembly.build import BuildRequest, BuiltDataset, build_dataset
from trainspan_processing.traces.trace_index import Clock
from trainspan_rollouts.delivery import VerdictSenders
from trainspan_rollouts.rollout_spans import RolloutSpan
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.store.endpoint import headers_of
from trainspan_schemas.store.roles import Role, make_home_token_file, otlp_headers_of
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity
from trainspan_serving.export.call_export import CallExport
from trainspan_serving.export.call_span import CallSpan
from trainspan_serving.export.collector_client import CollectorClient
from trainspan_serving.export.exporter import Exporter
from trainspan_serving.export.spools import open_spools

CALLS = 3
PAUSE_S = 0.01


class Senders:
    """A runner and a policy server that send the same rollouts to collectors: the real parts, with made-up calls."""

    def __init__(self, collectors: Collectors, tokens: Path, folder: Path) -> None:
        self.delivered: list[str] = []

        def client(url: str) -> CollectorClient:
            return CollectorClient(url, lambda: tuple(headers_of(otlp_headers_of(tokens, Role.SERVING)).items()))

        spools = open_spools(folder, collectors, 2**26)
        self.calls = CallExport(collectors, {url: Exporter(client(url), spool) for url, spool in spools.items()})
        self.verdicts = VerdictSenders(
            collectors,
            lambda _url: otlp_headers_of(tokens, Role.RUNNER),
            lambda span: self.delivered.append(str((span.attributes or {})[keys.ROLLOUT_ID])),
            lambda _span: None,
        )

    def close(self) -> None:
        assert self.verdicts.close(60.0) == 0
        deadline = time.monotonic() + 60
        while (counts := self.calls.counts()).exported < counts.captured:
            assert time.monotonic() < deadline, counts
            time.sleep(0.05)
        self.calls.close(5.0)


def run_rollouts(n_rollouts: int, killed: threading.Event, *all_senders: Senders) -> None:
    """Sends half of the rollouts after the kill."""
    provider = TracerProvider()
    for senders in all_senders:
        provider.add_span_processor(senders.verdicts)
    tracer = provider.get_tracer("test")
    for number in range(n_rollouts):
        assert number < n_rollouts // 2 or killed.wait(60)
        identity = Identity(f"rollout-{number}", "run", f"t{number // 4}", 0, 0)
        attributes = {**identity.attributes(), keys.GROUP_SIZE: 4, keys.ROLLOUT_SIGNED: True}
        root = RolloutSpan(tracer.start_span(keys.ROLLOUT_SPAN_NAME, attributes=attributes), identity)
        made = TestRollout(identity.rollout_id, task=identity.task_id)
        for index in range(CALLS):
            made.call(index, range(5 + index), [number, index])
        for span in made.spans[1:]:
            now = time.time_ns()
            ids = (root.parent.trace_id, span.span_id, root.parent.span_id)
            for senders in all_senders:
                senders.calls.add(CallSpan(*ids, "chat policy", now, now + 1, span.attributes))
        root.end("ok", calls=CALLS, judge="judge", scores={keys.REWARD: number % 4 / 4})
        time.sleep(PAUSE_S)


def spans_in(collector: CollectorProcess) -> list[str]:
    return [str(span_id) for (span_id,) in select(collector.address, "SELECT span_id FROM spans")]


def rollouts_in(collector: CollectorProcess) -> set[str]:
    return {
        str(one)
        for (one,) in select(
            collector.address,
            "SELECT DISTINCT rollout_id FROM (SELECT rollout_id FROM rollouts UNION SELECT rollout_id FROM calls)",
        )
    }


def dataset_of(stores: list[Path], out: Path) -> BuiltDataset:
    settings = DatasetSettings(credit="identical", min_coverage=1.0)
    return build_dataset(
        BuildRequest([str(store) for store in stores], out, settings, run_id="run", round=0),
        Clock(time.time_ns, time.sleep),
    )


@contextmanager
def collecting(folder: Path, *names: str) -> Iterator[dict[str, CollectorProcess]]:
    """Collectors by name, with the tokens of one file. They may be replaced meanwhile."""
    running = {name: start(folder, name, free_port()) for name in names}
    try:
        yield running
    finally:
        for collector in running.values():
            collector.kill()


def start(folder: Path, name: str, port: int) -> CollectorProcess:
    return CollectorProcess(folder / f"{name}.duckdb", "--grpc", f"127.0.0.1:{port}", "--http", "off")


def url_of(collector: CollectorProcess) -> str:
    return f"http://{collector.address.grpc}"


@pytest.mark.ci
@pytest.mark.parametrize("n_rollouts", [120, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_collector_killed_under_load_costs_nothing_and_the_dataset_is_that_of_one_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_rollouts: int
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    tokens = make_home_token_file()
    with collecting(tmp_path, "a", "b", "whole") as running:
        two = Collectors((url_of(running["a"]), url_of(running["b"])))
        whole = Collectors((url_of(running["whole"]),))
        divided, undivided = (Senders(of, tokens, tmp_path / str(len(of.urls))) for of in (two, whole))
        killed = threading.Event()
        load = threading.Thread(target=run_rollouts, args=(n_rollouts, killed, divided, undivided))
        load.start()
        before = _wait_for(divided, n_rollouts // 4)
        running["b"].kill()
        killed.set()
        _wait_for(divided, before + n_rollouts // 8)  # of the other one, which is not held up
        running["b"] = start(tmp_path, "b", int(str(running["b"].address.grpc).rpartition(":")[2]))
        load.join()
        divided.close()
        undivided.close()
        a, b, all_spans = (spans_in(running[name]) for name in ("a", "b", "whole"))
        assert len(all_spans) == n_rollouts * (1 + CALLS)
        assert sorted(a + b) == sorted(all_spans), "each acknowledged span is in exactly one store, once"
        for name in ("a", "b"):
            homes = {two.url_for(rollout) for rollout in rollouts_in(running[name])}
            assert homes == {url_of(running[name])}
        stores = [tmp_path / f"{name}.duckdb" for name in ("a", "b")]
        built = dataset_of(stores, tmp_path / "divided")
        expected = dataset_of([tmp_path / "whole.duckdb"], tmp_path / "undivided")
    assert built.manifest["rows"] == n_rollouts * CALLS
    assert built.manifest["split_traces"] == {"traces": 0, "examples": []}
    assert _digests(built) == _digests(expected)


def _wait_for(senders: Senders, n_delivered: int) -> int:
    """Waits until so many rollouts are acknowledged; returns their number."""
    deadline = time.monotonic() + 60
    while len(senders.delivered) < n_delivered:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return len(senders.delivered)


def _digests(built: BuiltDataset) -> list[Any]:
    return [file["sha256"] for file in built.manifest["files"]]
