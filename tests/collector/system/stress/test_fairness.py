"""Roles and commands do not wait for one another: in Flight, and for their turn while loading is behind."""

import contextlib
import fcntl
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from pyarrow import flight

from tests.support.collector.faults import reopening_loader
from tests.support.collector.process import CollectorProcess, export, get, running, span
from trainspan_collector.journal.backlog import Backlog
from trainspan_collector.journal.frames import HEADER_BYTES, Signal
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.segments import Position
from trainspan_schemas.store.access import lock_file, running_collector

DO_GET = "/arrow.flight.protocol.FlightService/DoGet"
READER, RUNNER = (f"{role}-token-{'x' * 20}" for role in ("reader", "runner"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    tokens = folder / "tokens.toml"
    tokens.write_text(f'reader = "{READER}"\nrunner = "{RUNNER}"\n')
    tokens.chmod(0o600)
    with running(folder / "s.duckdb", "--token-file", str(tokens)) as started:
        yield started


@contextlib.contextmanager
def _silent_readers(collector: CollectorProcess, n: int, token: str) -> Iterator[None]:
    """Reads that have started and never send their ticket."""
    go_on = threading.Event()

    def nothing() -> Iterator[bytes]:
        go_on.wait(60)
        yield from ()

    with contextlib.ExitStack() as opened:
        opened.callback(go_on.set)
        options = [("grpc.use_local_subchannel_pool", 1)]
        for _ in range(4):
            channel = opened.enter_context(grpc.insecure_channel(collector.address.flight, options=options))
            for _ in range(n // 4):
                metadata = (("authorization", f"Bearer {token}"),)
                call = channel.stream_stream(DO_GET)(nothing(), metadata=metadata, timeout=60)
                opened.callback(call.cancel)
        time.sleep(0.5)
        yield


def _options(token: str) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())], timeout=30)


def test_readers_that_hold_all_their_places_keep_neither_another_role_nor_upkeep_nor_each_other_waiting(
    guarded: CollectorProcess,
) -> None:
    ticket = flight.Ticket(json.dumps({"read": "spans"}).encode())
    with _silent_readers(guarded, 64, READER), flight.connect(f"grpc://{guarded.address.flight}") as client:
        began = time.monotonic()
        assert client.do_get(ticket, _options(RUNNER)).read_all().num_rows == 0
        [answer] = client.do_action(flight.Action("backlog", b"{}"), _options(RUNNER))
        assert json.loads(answer.body.to_pybytes())["journal_bytes_not_loaded"] == 0
        assert time.monotonic() - began < 5
        assert (
            client.do_get(ticket, _options(READER)).read_all().num_rows == 0
        )  # 64 silent readers took 32 slots for a second
        assert time.monotonic() - began < 15


def test_agents_leave_room_for_other_senders(tmp_path: Path) -> None:
    now, frame = 0.0, HEADER_BYTES + 100
    loaded = Position(1, 0)
    journal = Journal(tmp_path)
    backlog = Backlog(journal, lambda: loaded, least_bytes=frame, clock=lambda: now)
    for _ in range(100):
        journal.append(Signal.TRACES, bytes(100), 1)
    for second in range(1, 61):
        now, loaded = float(second), Position(1, second * frame)  # one per second
        backlog.seconds()
    left = 40 * frame
    room_bytes = left * 4 // 5  # 5/9 are taken: both are slowed

    def turns(*, untrusted: bool) -> list[float]:
        return [backlog.turn(frame, room_bytes, limit_s=100, untrusted=untrusted) for _ in range(20)]

    assert turns(untrusted=True)[-1] > 10
    assert backlog.turn(frame, room_bytes, limit_s=1) == 0
    assert turns(untrusted=False)[-1] == pytest.approx(20 / (2 * (0.75 - 5 / 9) / 0.25), rel=0.01)
    room_bytes = left // 2  # 2/3 are taken
    assert backlog.turn(frame, room_bytes, limit_s=1000, untrusted=True) > 1000
    assert backlog.turn(frame, room_bytes, limit_s=1000, untrusted=False) < 1000
    journal.close()


def test_while_the_store_is_reopened_no_other_process_can_take_it_and_readers_wait(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store, faults=reopening_loader(tmp_path / "faults"), log="ERROR", load_interval_s=0.05) as collector:
        n_taken, n_lost, stop = 0, 0, threading.Event()

        def watch() -> None:
            nonlocal n_taken, n_lost
            while not stop.is_set():
                n_lost += running_collector(store) is None
                with lock_file(store).open() as lock, contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    n_taken += 1
                time.sleep(0.001)

        watching = threading.Thread(target=watch)
        watching.start()
        export(collector.address, span(1, 1))
        while not (tmp_path / "faults" / "reopened").exists():
            time.sleep(0.01)
        rows = get(collector.address, {"read": "spans"}).num_rows
        stop.set()
        watching.join()
        assert (rows, n_taken, n_lost) == (1, 0, 0)
        assert running_collector(store) == collector.address
