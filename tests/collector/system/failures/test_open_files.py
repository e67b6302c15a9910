"""A collector that runs out of file descriptors: it keeps running, and nothing that it acknowledged is lost."""

import itertools
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.support.collector.process import (
    ANY_PORT,
    TRACES,
    CollectorProcess,
    channel,
    read,
    running,
    span,
    trace_request,
)
from tests.support.otlp.http import request

SEGMENT_BYTES = 16 * 1024 * 1024


@contextmanager
def no_file_more(collector: CollectorProcess, *, but: int = 0) -> Iterator[None]:
    """Opening a file, connection or process fails with EMFILE within the block, beyond `but` at a time."""
    pid = collector.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = 3
    if but:
        time.sleep(0.5)  # readers' connections close
        taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
        free = (number for number in range(before[0]) if number not in taken)
        limit = next(itertools.islice(free, but, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def body(*numbers: int, n_bytes: int = 0) -> bytes:
    spans = [span(1, number, {"text": "x" * n_bytes} if n_bytes else None) for number in numbers]
    return trace_request(*spans).SerializeToString()


def test_a_loader_that_may_open_no_file_tries_again_and_loads_all_that_was_acknowledged(tmp_path: Path) -> None:
    with running(tmp_path / "s.duckdb", http=ANY_PORT, load_interval_s=0.05, log="WARNING") as collector:
        with channel(collector.address) as opened:
            export = opened.unary_unary(TRACES)
            export(body(1), timeout=20)
            wait_until(lambda: len(read(collector.address, "spans")) == 1)
            with no_file_more(collector):
                for number in range(2, 6):
                    export(body(number), timeout=20)
                time.sleep(1.2)
                assert collector.process.poll() is None
            export(body(6), timeout=20)
        wait_until(lambda: len(read(collector.address, "spans")) == 6)
        page = request(collector.address, "/metrics", method="GET").body.decode()
        (line,) = [line for line in page.splitlines() if line.startswith("trainspan_collector_loads_put_off ")]
        assert float(line.split()[1]) >= 2
        assert collector.terminate() == 0
        assert collector.process.stderr is not None
        assert "loading put off error=[Errno 24] Too many open files" in collector.process.stderr.read()


def test_a_journal_that_may_open_no_segment_refuses_what_it_cannot_keep_and_takes_it_later(tmp_path: Path) -> None:
    with running(tmp_path / "s.duckdb", load_interval_s=0.05) as collector:
        with channel(collector.address) as opened:
            export = opened.unary_unary(TRACES)
            export(body(1, 2, n_bytes=SEGMENT_BYTES // 2), timeout=20)  # the next request begins a segment
            wait_until(lambda: len(read(collector.address, "spans")) == 2)
            with no_file_more(collector):
                for _ in range(3):
                    with pytest.raises(grpc.RpcError) as refused:
                        export(body(3), timeout=20)
                    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                time.sleep(0.5)
                assert collector.process.poll() is None
            export(body(3), timeout=20)
        assert [row["span_id"][-1] for row in read(collector.address, "spans")] == ["1", "2", "3"]
        assert collector.terminate() == 0


def test_the_process_that_makes_rows_is_started_once_files_can_be_opened(tmp_path: Path) -> None:
    """A collector under load starts the process after the first full batch; here it fails at first."""
    with running(tmp_path / "s.duckdb", load_interval_s=0.05, load_max_bytes=100_000) as collector:
        with channel(collector.address) as opened:
            export = opened.unary_unary(TRACES)
            export(body(100), timeout=20)
            wait_until(lambda: len(read(collector.address, "spans")) == 1)
            with no_file_more(collector, but=1):  # enough to read the journal, but not to start a process
                export(body(*range(1, 50), n_bytes=4_000), timeout=20)
                time.sleep(1.2)
                assert collector.process.poll() is None
                assert not collector.batcher_processes()
            export(body(*range(50, 100), n_bytes=4_000), timeout=20)
            wait_until(lambda: len(collector.batcher_processes()) == 1)
            assert len(read(collector.address, "spans")) == 100
        assert collector.terminate() == 0
