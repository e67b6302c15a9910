"""Calls with several collectors: each goes to the collector of its rollout, and waits for that one only."""

import errno
from pathlib import Path

import pytest

from tests.support.otlp.sink import otlp_sink
from tests.support.ports import free_port
from trainspan_schemas.policy_server import CallCounts
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry import keys
from trainspan_serving.export.call_export import CallExport
from trainspan_serving.export.call_span import CallSpan
from trainspan_serving.export.collector_client import CollectorClient
from trainspan_serving.export.exporter import Exporter
from trainspan_serving.export.spools import open_spools

MIB = 2**20


def export_to(collectors: Collectors, folder: Path) -> CallExport:
    spools = open_spools(folder, collectors, MIB)
    return CallExport(collectors, {url: Exporter(CollectorClient(url), spool) for url, spool in spools.items()})


def call(number: int, rollout: str | None) -> CallSpan:
    ids = {} if rollout is None else {keys.ROLLOUT_ID: rollout}
    return CallSpan(f"{number + 1:032x}", f"{number + 1:016x}", None, "chat", 1, 2, {"number": number, **ids})


def test_calls_follow_their_rollout_and_without_one_their_trace(tmp_path: Path) -> None:
    rollouts = [f"r{number // 2}" if number % 4 else None for number in range(40)]
    with otlp_sink() as (first, first_url), otlp_sink() as (second, second_url):
        collectors = Collectors((first_url, second_url))
        export = export_to(collectors, tmp_path)
        for number, rollout in enumerate(rollouts):
            export.add(call(number, rollout))
        export.close(5.0)
        found = {
            url: {one.attributes["number"] for one in sink.spans()}
            for url, sink in ((first_url, first), (second_url, second))
        }
    expected: dict[str, set[int]] = {first_url: set(), second_url: set()}
    for number, rollout in enumerate(rollouts):
        expected[collectors.url_for(rollout or f"{number + 1:032x}")].add(number)
    assert found == expected
    assert all(expected.values())
    assert export.counts() == CallCounts(40, 40, 0)


def test_calls_wait_on_disk_for_their_own_collector_and_the_trouble_names_it(tmp_path: Path) -> None:
    down = f"http://127.0.0.1:{free_port()}"
    with otlp_sink() as (sink, url):
        export = export_to(Collectors((down, url)), tmp_path)
        for number in range(40):
            export.add(call(number, f"r{number}"))
        export.close(1.0)
        arrived = len(sink.spans())
    assert 0 < arrived < 40
    assert export.counts() == CallCounts(40, arrived, 0, spooled=40 - arrived)
    assert str(export.trouble()).startswith(f"{down}: UNAVAILABLE")


def test_calls_that_wait_for_a_collector_that_is_removed_go_to_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    down = f"http://127.0.0.1:{free_port()}"
    first = export_to(Collectors((down,)), tmp_path)
    for number in range(10):
        first.add(call(number, f"r{number}" if number % 2 else None))
    first.close(1.0)
    assert first.counts().spooled == 10
    with otlp_sink() as (one, one_url), otlp_sink() as (two, two_url):
        collectors = Collectors((one_url, two_url))
        export = export_to(collectors, tmp_path)
        export.close(10.0)
        found = {
            url: {span.attributes["number"] for span in sink.spans()} for url, sink in ((one_url, one), (two_url, two))
        }
    keys_of = {number: f"r{number}" if number % 2 else f"{number + 1:032x}" for number in range(10)}
    for url, numbers in found.items():
        assert numbers == {number for number, key in keys_of.items() if collectors.url_for(key) == url}
    assert "calls that waited for a collector that is no longer named go to the others count=10" in caplog.text
    assert export.counts() == CallCounts(0, 0, 0), "they were counted by the earlier server"


def test_calls_of_a_removed_collector_that_cannot_be_read_now_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = export_to(Collectors((f"http://127.0.0.1:{free_port()}",)), tmp_path)
    first.add(call(0, "r"))
    first.close(1.0)
    other = Collectors((f"http://127.0.0.1:{free_port()}",))

    def fail(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        (spool,) = open_spools(tmp_path, other, MIB).values()
    assert len(spool) == 0
    assert "calls wait for a collector that is no longer named" in caplog.text
    (spool,) = open_spools(tmp_path, other, MIB).values()
    assert spool.recovered == 1


def test_without_a_collector_calls_are_counted_and_dropped() -> None:
    export = CallExport(None, {})
    export.add(call(0, "r"))
    export.close(1.0)
    assert export.counts() == CallCounts(1, 0, 1)
