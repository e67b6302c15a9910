"""The collector as a process: start, stop, and what can prevent either."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest

from tests.support.collector.faults import reopening_loader
from tests.support.collector.process import (
    TRACES,
    CollectorProcess,
    channel,
    export,
    read,
    running,
    select,
    span,
    spawn_collector,
    trace_request,
)
from trainspan_schemas.store.access import address_file, open_store, running_collector
from trainspan_schemas.store.endpoint import StoreEndpoint

pytestmark = pytest.mark.ci


def _failure(store: Path, *arguments: str) -> str:
    """The single stderr line of a collector that does not start."""
    process = spawn_collector(store, *arguments)
    _, text = process.communicate(timeout=30)
    assert process.returncode != 0
    [line] = text.splitlines()
    return line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_drains_everything_acknowledged_into_the_file(tmp_path: Path, number: int) -> None:
    store = tmp_path / "spans.duckdb"
    collector = CollectorProcess(store, load_interval_s=30)
    acknowledged: list[int] = []
    refusals: list[grpc.StatusCode] = []

    def send_until_refused() -> None:
        with channel(collector.address) as opened:
            for index in range(1, 100_000):
                body = trace_request(span(1, index, {"text": "x" * 1_000})).SerializeToString()
                try:
                    opened.unary_unary(TRACES)(body, timeout=10)
                except grpc.RpcError as error:
                    refusals.append(error.code())
                    return
                acknowledged.append(index)
                if index == 50:
                    enough.set()

    enough = threading.Event()
    client = threading.Thread(target=send_until_refused)
    client.start()
    assert enough.wait(20)
    collector.process.send_signal(number)
    assert collector.process.wait(30) == 0
    client.join()
    assert set(refusals) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}  # both mean "retry"
    assert not address_file(store).exists()
    assert not list(tmp_path.glob("spans.duckdb.journal/*.journal"))  # everything is checkpointed
    with open_store(str(store)) as endpoint:  # a reader starts its own collector
        found = _count(endpoint)
    assert found >= len(acknowledged) >= 50


def _count(endpoint: StoreEndpoint) -> int:
    from pyarrow import flight

    with flight.connect(endpoint.location) as client:
        options = flight.FlightCallOptions(headers=endpoint.call_headers)
        table = client.do_get(flight.Ticket(b'{"sql": "SELECT count(*) AS n FROM spans"}'), options).read_all()
    count: int = table["n"][0].as_py()
    return count


def test_the_address_file_and_the_store_belong_to_their_owner_alone(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store) as collector:
        export(collector.address, span(1, 1))
        assert len(read(collector.address, "spans")) == 1
        assert running_collector(store) == collector.address
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert {path.name for path in files} >= {"spans.duckdb", "spans.duckdb.wal", "spans.duckdb.json", "lock"}
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_second_collector_on_a_store_names_the_first_and_leaves_it_alone(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store) as first:
        line = _failure(store)
        assert line.startswith("trainspan: ")
        assert f"pid {first.process.pid}" in line
        assert running_collector(store) == first.address
        export(first.address, span(1, 1))
        assert select(first.address, "SELECT count(*) FROM spans") == [(1,)]


def test_a_database_that_another_program_has_open_is_named_with_its_holder(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    code = f"import duckdb; connection = duckdb.connect({str(store)!r}); print('open', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        line = _failure(store)
    finally:
        holder.communicate(b"\n", timeout=10)
    assert f"process {holder.pid}" in line


def test_all_taken_ports_are_in_one_line_that_names_their_holder(tmp_path: Path) -> None:
    options = ("--grpc", "--http", "--flight")
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in options]
        places = [f"127.0.0.1:{port}" for port in taken]
        words = [word for option, place in zip(options, places, strict=True) for word in (option, place)]
        line = _failure(tmp_path / "spans.duckdb", *words)
    for option, place in zip(options, places, strict=True):
        assert f"{option} {place} is in use by pid {os.getpid()} (" in line
    assert line.endswith("stop that, or take other ports, such as --set ports.base=0 for any free ones")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--http", "4318"], "'4318' is not HOST:PORT"),
        (["--http", "0.0.0.0:0"], "--insecure-allow-remote"),
        (["--flight", "off"], "--flight HOST:PORT"),
        (["--grpc", "4317"], "'4317' is not HOST:PORT"),
        (["--grpc", "0.0.0.0:0"], "--insecure-allow-remote"),
        (["--flight", "example.com:1"], "--insecure-allow-remote"),
    ],
)
def test_listeners_that_cannot_be_meant_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in _failure(tmp_path / "spans.duckdb", *arguments)


def test_other_machines_are_let_in_only_when_asked_for(tmp_path: Path) -> None:
    with running(tmp_path / "s.duckdb", "--grpc", "0.0.0.0:0", "--insecure-allow-remote") as open_to_all:
        assert str(open_to_all.address.grpc).startswith("0.0.0.0:")
        with grpc.insecure_channel(f"127.0.0.1:{str(open_to_all.address.grpc).rpartition(':')[2]}") as opened:
            assert opened.unary_unary(TRACES)(b"", timeout=5) == b""


def test_a_file_that_is_no_store_of_this_version_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    text = tmp_path / "text.duckdb"
    text.write_text("hello " * 1_000)
    assert "cannot open" in _failure(text)
    assert text.read_text() == "hello " * 1_000
    for name, statements, message in [
        ("foreign", "CREATE TABLE t (x INTEGER)", "is a DuckDB file but not a trainspan store"),
        ("newer", "CREATE TABLE meta AS SELECT 'schema_version' AS key, '999' AS value", "store version 999"),
        ("older", "CREATE TABLE meta AS SELECT 'schema_version' AS key, '9' AS value", "store version 9"),
        ("unnamed", "CREATE TABLE meta (key VARCHAR, value VARCHAR)", "store version unknown"),
    ]:
        path = tmp_path / f"{name}.duckdb"
        code = f"import duckdb; duckdb.connect({str(path)!r}).execute({statements!r})"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
        assert message in _failure(path)


@pytest.mark.parametrize("name", ["000000000001.journal", "notes.journal", "000000000001-00.journal"])
def test_a_foreign_file_in_the_journal_is_refused_by_name(tmp_path: Path, name: str) -> None:
    store = tmp_path / "spans.duckdb"
    folder = store.with_name(store.name + ".journal")
    folder.mkdir()
    (folder / name).write_bytes(b"TSJ1")
    assert f"{folder / name} is not a journal file" in _failure(store)


def test_a_reader_alone_reads_a_store_with_grpc_off(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store) as collector:
        export(collector.address, span(1, 1))
    with running(store, "--grpc", "off") as reader:
        assert reader.address.grpc is None
        assert len(read(reader.address, "spans")) == 1


def test_a_collector_for_readers_goes_on_after_it_reopened_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if other files get the numbers of closed descriptors: with one of them it would hold the readers' lock for free."""
    store, closed = tmp_path / "spans.duckdb", tmp_path / "faults" / "closed"
    collector = CollectorProcess(store, load_interval_s=30)
    export(collector.address, span(1, 1))
    collector.kill()  # the span is only in the journal
    faults = reopening_loader(tmp_path / "faults")
    with (faults / "sitecustomize.py").open("a") as program:
        program.write(_TAKES_FREE_DESCRIPTORS)
    monkeypatch.setenv("PYTHONPATH", str(faults), prepend=os.pathsep)
    with open_store(str(store)) as endpoint:
        address = running_collector(store)
        assert address is not None
        deadline = time.monotonic() + 30
        while not closed.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert _count(endpoint) == 1
        time.sleep(1)  # two looks at the lock
        assert _count(endpoint) == 1
        assert running_collector(store) == address
    assert running_collector(store) is None


_TAKES_FREE_DESCRIPTORS = """
import time
from pathlib import Path
from trainspan_collector import session

leave = session.StoreSession.__exit__

def leave_slowly(self, *arguments):
    opened = [open(__file__) for _ in range(64)]
    time.sleep(1)
    for file in opened:
        file.close()
    leave(self, *arguments)
    Path(__file__).with_name("closed").touch()

session.StoreSession.__exit__ = leave_slowly
"""
