"""Readers of a store without a running collector: they share one, and the last of them ends it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.support.collector.process import CollectorProcess, export, get, read, running, span
from trainspan_schemas.store.access import StoreAddress, open_store, running_collector, write_address
from trainspan_schemas.store.endpoint import StoreEndpoint


def _fill(store: Path, n_spans: int) -> None:
    with running(store) as collector:
        export(collector.address, *(span(1, number) for number in range(1, n_spans + 1)))


def _get(endpoint: StoreEndpoint, ticket: object) -> pa.Table:
    options = flight.FlightCallOptions(headers=endpoint.call_headers)
    with flight.connect(endpoint.location, **endpoint.connect_options) as client:
        return client.do_get(flight.Ticket(json.dumps(ticket).encode()), options).read_all()


def _count(endpoint: StoreEndpoint) -> int:
    count: int = _get(endpoint, {"sql": "SELECT count(*) AS n FROM spans"})["n"][0].as_py()
    return count


@pytest.mark.ci
def test_readers_that_come_at_once_share_one_collector_and_the_last_one_ends_it(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    _fill(store, 7)
    both = threading.Barrier(3)
    seen: list[tuple[str, int]] = []

    def follow(stay_s: float) -> None:
        both.wait()
        with open_store(str(store)) as endpoint:
            first = _count(endpoint)
            time.sleep(stay_s)
            seen.append((endpoint.location, first + _count(endpoint)))

    readers = [threading.Thread(target=follow, args=(stay_s,)) for stay_s in (0.0, 0.5, 1.0)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [count for _, count in seen] == [14, 14, 14]
    assert len({location for location, _ in seen}) == 1
    assert running_collector(store) is None
    with running(store) as collector:  # immediately: the store is no longer locked
        assert len(read(collector.address, "spans")) == 7


def test_three_commands_at_once_all_answer(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    _fill(store, 3)
    command = [sys.executable, "-m", "trainspan_cli", "sql", "--format", "csv", "--store", str(store)]
    environment = {**os.environ, "TRAINSPAN_HOME": str(tmp_path)}
    started = [
        subprocess.Popen(
            [*command, "SELECT count(*) AS n FROM spans"], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["n\n3\n"] * 3


def test_a_reader_that_is_killed_leaves_no_collector_behind(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    _fill(store, 1)
    program = f"""
from trainspan_schemas.store.endpoint import StoreEndpoint
from trainspan_schemas.store.access import open_store
with open_store({str(store)!r}):
    print("open", flush=True)
    input()
"""
    reader = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"open\n"
    address = running_collector(store)
    assert address is not None
    assert address.for_readers
    reader.send_signal(signal.SIGKILL)
    reader.communicate()
    deadline = time.monotonic() + 30
    while running_collector(store) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_path_is_read_the_same_with_a_running_collector_and_without(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    tickets = [{"read": name} for name in ("spans", "logs", "calls", "evaluations", "rollouts")]
    with running(store, load_interval_s=30) as collector:
        export(collector.address, *(span(1, number, {"n": number}) for number in range(1, 50)))
        live = [get(collector.address, ticket) for ticket in tickets]
        export(collector.address, span(1, 50, {"n": 50}))
        collector.kill()  # the last span is only in the journal
    with open_store(str(store)) as endpoint:
        alone = [_get(endpoint, ticket) for ticket in tickets]
    for with_one, without in zip(live, alone, strict=True):
        assert without.schema.remove_metadata() == with_one.schema.remove_metadata()
    assert alone[0].sort_by("seq").slice(0, 49).to_pylist() == live[0].sort_by("seq").to_pylist()
    assert alone[0].num_rows == 50


def test_an_address_file_without_the_newest_field_is_read(tmp_path: Path) -> None:
    old = {"pid": os.getpid(), "store": "s", "grpc": None, "http": None, "flight": "127.0.0.1:1"}
    with (tmp_path / "s.json").open("w") as file:
        json.dump(old, file)
        file.flush()
        assert running_collector(tmp_path / "s") is None
        fcntl.flock(file, fcntl.LOCK_EX)
        assert running_collector(tmp_path / "s") == StoreAddress(os.getpid(), "s", None, None, "127.0.0.1:1")


@pytest.mark.ci
@pytest.mark.parametrize("left", ["a zombie", "a pid that another process has now"])
def test_a_collector_that_was_killed_is_not_taken_for_running(tmp_path: Path, left: str) -> None:
    store = tmp_path / "spans.duckdb"
    collector = CollectorProcess(store)
    export(collector.address, span(1, 1))
    collector.process.kill()
    os.waitid(os.P_PID, collector.process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and has not been reaped
    if left != "a zombie":
        collector.process.wait()
        os.close(write_address(replace(collector.address, pid=os.getpid())))
    assert running_collector(store) is None
    with open_store(str(store)) as endpoint:
        assert _count(endpoint) == 1
    with running(store) as again:
        assert len(read(again.address, "spans")) == 1
    collector.process.wait()
