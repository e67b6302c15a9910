"""The collector under load: acknowledged and loaded spans per second and per CPU-second, and the latency of answers.

Spans of 8 KiB (500 prompt and 200 completion tokens, messages, identity), 64 per request, 4 connections from one client
process on the same machine. The machine's limits are measured too: its disk's sync rate and write speed.

CPU-seconds are those of the collector's processes: of all of them, until everything is in DuckDB, and of the intake alone,
from the socket to the acknowledged bytes on disk, without the loader's thread, DuckDB's threads and the row process.
The intake is comparable with a peer that keeps spans in memory; the whole also builds rows, looks for duplicates, and
compresses the rows into a file.
"""

import http.client
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from pyarrow import flight

from benchmarks.collector.collector_stages import limits
from benchmarks.collector.collector_stages import measure as measure_stages
from benchmarks.peers.agentlightning_intake import PEER_PYTHON
from benchmarks.peers.agentlightning_intake import measure as measure_peer
from benchmarks.support.cpu_time import cpu_s, peak_kib, processes, thread_cpu_s, tree_cpu_s
from benchmarks.support.export_requests import SPAN_BYTES, SPANS_PER_REQUEST, requests
from tests.support.collector.process import ANY_PORT, running
from trainspan_schemas.store.access import StoreAddress

__all__ = ["burst", "count_spans", "measure"]

_CONNECTIONS = 4
_BURST_S = 30.0
_HTTP_BURST_S = 8.0
_SUSTAINED_S = 20.0
_RATES = (1_000, 2_000, 4_000, 6_000, 8_000, 10_000, 12_000, 14_000)
_FLAT_MIB = 24.0
"""A batch and a half: the backlog rises and falls by one."""
_Send = Callable[[StoreAddress, float, Iterator[bytes], list[float]], None]
_LOADING = ("loader", "duckdb", "keys")
"""Names of the loading threads."""
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def measure(burst_s: float = _BURST_S, sustained_s: float = _SUSTAINED_S) -> dict[str, Any]:
    """Measures a burst at full speed, the steady flow that is held, the stages of a span, and the machine's limits."""
    with tempfile.TemporaryDirectory(prefix="trainspan-bench-") as folder:
        of_machine = limits(Path(folder))
        of_burst = _measure_burst(Path(folder) / "burst.duckdb", burst_s)
        of_http = _measure_http(Path(folder) / "http.duckdb")
        of_flow = _measure_flow(Path(folder) / "flow.duckdb", sustained_s)
    return {
        **of_machine,
        **of_burst,
        **of_http,
        **of_flow,
        **measure_stages(),
        **_measure_peer({**of_burst, **of_http}),
    }


def _measure_peer(ours: dict[str, Any]) -> dict[str, Any]:
    """The peer's intake over HTTP, and the ratio of our spans per CPU-second (whole process, intake alone) to the peer's."""
    python = os.environ.get(PEER_PYTHON)
    if not python:
        return {}
    of_peer = measure_peer(Path(python))
    return {
        **of_peer,
        **{
            f"{transport}{part}_to_peer": round(
                ours[f"{transport}spans_per_{part}_cpu_s"] / of_peer["peer_spans_per_cpu_s"], 1
            )
            for transport in ("", "http_")
            for part in ("collector", "intake")
        },
    }


def _measure_burst(store: Path, burst_s: float) -> dict[str, Any]:
    with running(store, "--http", ANY_PORT) as collector:
        address, pid = collector.address, collector.process.pid
        cpu, began = _Cpu(pid), time.monotonic()
        with _memory(pid) as taken_mib:
            seconds = burst(address, burst_s)
        burst_end, cpu_in_burst = time.monotonic(), cpu.used_s()
        n_spans = len(seconds) * SPANS_PER_REQUEST
        n_loaded_at_end = count_spans(address, wait_ms=0)
        n_loaded = count_spans(address, wait_ms=600_000)
        loaded_end = time.monotonic()
        per_cpu_s = cpu.spans_per_s(n_spans)
        peak_mib = _peak_mib(pid)
    seconds.sort()
    return {
        "spans": n_spans,
        "lost_or_doubled_spans": n_loaded - n_spans,
        "acknowledged_spans_per_s": round(n_spans / (burst_end - began)),
        "acknowledged_mib_per_s": round(n_spans * SPAN_BYTES / 2**20 / (burst_end - began)),
        "ack_p50_ms": round(1000 * seconds[len(seconds) // 2], 1),
        "ack_p99_ms": round(1000 * seconds[int(len(seconds) * 0.99)], 1),
        "ack_max_ms": round(1000 * seconds[-1], 1),
        "spans_loaded_when_the_burst_ended": n_loaded_at_end,
        "loaded_spans_per_s": round(n_spans / (loaded_end - began)),
        "collector_cpu_s_in_burst": round(cpu_in_burst, 1),
        **per_cpu_s,
        "peak_pss_mib": max(taken_mib),
        "peak_rss_of_all_processes_mib": peak_mib,
        "stored_bytes_per_span": round(store.stat().st_size / n_spans),
    }


def _measure_http(store: Path) -> dict[str, Any]:
    """A short burst over OTLP/HTTP."""
    with running(store, "--http", ANY_PORT) as collector:
        address, pid = collector.address, collector.process.pid
        cpu, began = _Cpu(pid), time.monotonic()
        seconds = sorted(burst(address, _HTTP_BURST_S, _send_http))
        took = time.monotonic() - began
        n_spans = len(seconds) * SPANS_PER_REQUEST
        lost = count_spans(address, wait_ms=600_000) - n_spans
        per_cpu_s = cpu.spans_per_s(n_spans)
    return {
        "http_lost_or_doubled_spans": lost,
        "http_acknowledged_spans_per_s": round(n_spans / took),
        "http_ack_p99_ms": round(1000 * seconds[int(len(seconds) * 0.99)], 1),
        **{f"http_{name}": figure for name, figure in per_cpu_s.items()},
    }


class _Cpu:
    """CPU-seconds of a collector since the creation of this object."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before_s, self._loading_before_s = self._all_s(), self._loading_s()

    def used_s(self) -> float:
        return self._all_s() - self._before_s

    def spans_per_s(self, n_spans: int) -> dict[str, int]:
        """Spans per CPU-second of the whole and of the intake."""
        loading_s = self._loading_s() - self._loading_before_s
        return {
            "spans_per_collector_cpu_s": round(n_spans / self.used_s()),
            "spans_per_intake_cpu_s": round(n_spans / (self.used_s() - loading_s)),
        }

    def _all_s(self) -> float:
        return tree_cpu_s(self._pid)

    def _loading_s(self) -> float:
        makes_rows = processes(self._pid)[1:]
        return sum(thread_cpu_s(self._pid, name) for name in _LOADING) + sum(map(cpu_s, makes_rows))


def _measure_flow(store: Path, seconds: float) -> dict[str, Any]:
    """The highest of _RATES that one collector holds, and what the next one does: the backlog, in bytes of the journal that are
    not loaded, is no larger in the last third than in the first, but for _FLAT_MIB."""
    figures: dict[str, Any] = {"sustained_spans_per_s": 0}
    with running(store, "--http", ANY_PORT) as collector:
        address, pid = collector.address, collector.process.pid
        n_before = 0
        for rate in _RATES:
            backlog_mib: list[float] = []
            taken_mib: list[int] = []
            flow = threading.Thread(target=_flow, args=(address, seconds, rate, sent := []))
            flow.start()
            began = time.monotonic()
            while flow.is_alive():
                time.sleep(min(1.0, seconds / 10))
                backlog_mib.append(_stats(address)["journal_bytes_not_loaded"] / 2**20)
                taken_mib.append(_pss_mib(pid))
            took_s = time.monotonic() - began
            n_loaded, n_before = (
                count_spans(address, wait_ms=600_000) - n_before,
                n_before + len(sent) * SPANS_PER_REQUEST,
            )
            third = max(1, len(backlog_mib) // 3)
            thirds = [round(sum(part) / len(part), 1) for part in (backlog_mib[:third], backlog_mib[-third:])]
            is_held = thirds[1] <= thirds[0] + _FLAT_MIB and len(sent) * SPANS_PER_REQUEST > 0.95 * rate * seconds
            of_rate = {
                "spans_per_s": round(len(sent) * SPANS_PER_REQUEST / took_s),
                "ack_p99_ms": round(1000 * sorted(sent)[int(len(sent) * 0.99)], 1),
                "lost_or_doubled_spans": n_loaded - len(sent) * SPANS_PER_REQUEST,
                "backlog_mib_first_and_last_third": thirds,
                "peak_pss_mib": max(taken_mib),
            }
            figures |= {f"{'sustained' if is_held else 'beyond'}_{name}": figure for name, figure in of_rate.items()}
            if not is_held:
                break
    return figures


def burst(address: StoreAddress, seconds: float, send: _Send | None = None) -> list[float]:
    """Sends from all connections for `seconds`; returns the seconds that each answer took."""
    taken: list[float] = []
    senders = [requests(seed) for seed in range(_CONNECTIONS)]
    for sender in senders:
        next(sender)  # creates its spans
    stop_at = time.monotonic() + seconds
    threads = [threading.Thread(target=send or _send, args=(address, stop_at, sender, taken)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def _flow(address: StoreAddress, seconds: float, spans_per_s: int, taken: list[float]) -> None:
    """Sends at a steady pace over one connection, never faster; the seconds of each answer are appended to `taken`."""
    bodies, began = requests(0), time.monotonic()
    with _channel(address) as channel:
        export = channel.unary_unary(_EXPORT)
        while (now := time.monotonic()) < began + seconds:
            due = began + len(taken) * SPANS_PER_REQUEST / spans_per_s
            if due > now:
                time.sleep(due - now)
            sent = time.monotonic()
            export(next(bodies), timeout=60, metadata=_bearer(address))
            taken.append(time.monotonic() - sent)


def _channel(address: StoreAddress) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    return grpc.insecure_channel(str(address.grpc), options=options)


def _bearer(address: StoreAddress) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {address.token}"),)


def _call_options(address: StoreAddress) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(headers=address.endpoint.call_headers)


def _send(address: StoreAddress, stop_at: float, bodies: Iterator[bytes], taken: list[float]) -> None:
    with _channel(address) as channel:
        export = channel.unary_unary(_EXPORT)
        while (began := time.monotonic()) < stop_at:
            export(next(bodies), timeout=60, metadata=_bearer(address))
            taken.append(time.monotonic() - began)


def _send_http(address: StoreAddress, stop_at: float, bodies: Iterator[bytes], taken: list[float]) -> None:
    host, _, port = str(address.http).rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    while (began := time.monotonic()) < stop_at:
        headers = {"Content-Type": "application/x-protobuf", **dict(_bearer(address))}
        connection.request("POST", "/v1/traces", next(bodies), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {response.read()[:200]!r}")
        response.read()
        taken.append(time.monotonic() - began)
    connection.close()


def count_spans(address: StoreAddress, *, wait_ms: int) -> int:
    ticket = {"sql": "SELECT count(*) AS n FROM spans", "wait_ms": wait_ms}
    client, options = flight.connect(f"grpc://{address.flight}"), _call_options(address)
    table = client.do_get(flight.Ticket(json.dumps(ticket).encode()), options).read_all()
    count: int = table["n"][0].as_py()
    return count


def _peak_mib(pid: int) -> int:
    """Sum of the peaks of the collector's processes; shared pages count twice."""
    return sum(map(peak_kib, processes(pid))) // 1024


@contextmanager
def _memory(pid: int) -> Iterator[list[int]]:
    """The collector's memory, sampled twice a second during the block."""
    taken_mib, ended = [_pss_mib(pid)], threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            taken_mib.append(_pss_mib(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield taken_mib
    finally:
        ended.set()
        looking.join()


def _pss_mib(pid: int) -> int:
    """Current memory of the collector's processes; shared pages count once (proportional set size)."""
    lines = [line for each in processes(pid) for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1024


def _stats(address: StoreAddress) -> dict[str, Any]:
    with flight.connect(f"grpc://{address.flight}") as client:
        [result] = client.do_action(flight.Action("stats", b'{"wait_ms": 0}'), _call_options(address))
    answer: dict[str, Any] = json.loads(result.body.to_pybytes())
    return answer


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
