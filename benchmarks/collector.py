"""The collector under load: acknowledged and loaded spans per second and per CPU-second, and how long an answer takes.

Spans of 8 KiB (500 prompt and 200 completion tokens, messages, identity), 64 per request, 4 connections from one client
process on the same machine. Beside them the machine's own limits: how often its disk syncs, and how fast it writes.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pyarrow import flight

from trainspan_schemas import keys
from trainspan_schemas.store import StoreAddress, running_collector
from trainspan_schemas.tokens import encode_ids, encode_logprobs

__all__ = ["measure"]

_SPANS = 64
_SPAN_BYTES = 8192
_CONNECTIONS = 4
_BURST_S = 10.0
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_TRACE_MARK, _SPAN_MARK = b"\xfetrace-id-here\xff!", b"\xfespanid\xff"


def measure(burst_s: float = _BURST_S) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="trainspan-bench-") as folder:
        limits = _disk_limits(Path(folder))
        with _collector(Path(folder) / "spans.duckdb") as (address, process):
            cpu_before, began = _cpu_s(process.pid), time.monotonic()
            seconds = _burst(address, burst_s)
            n_spans = len(seconds) * _SPANS
            burst_end, cpu_burst = time.monotonic(), _cpu_s(process.pid)
            n_loaded_at_end = _count(address, wait_ms=0)
            n_loaded = _count(address, wait_ms=600_000)
            loaded_end, cpu_loaded = time.monotonic(), _cpu_s(process.pid)
            peak_mib = _peak_mib(process.pid)
        store_bytes = (Path(folder) / "spans.duckdb").stat().st_size
    seconds.sort()
    return {
        **limits,
        "spans": n_spans,
        "lost_or_doubled_spans": n_loaded - n_spans,
        "acknowledged_spans_per_s": round(n_spans / (burst_end - began)),
        "acknowledged_mib_per_s": round(n_spans * _SPAN_BYTES / 2**20 / (burst_end - began)),
        "ack_p50_ms": round(1000 * seconds[len(seconds) // 2], 1),
        "ack_p99_ms": round(1000 * seconds[int(len(seconds) * 0.99)], 1),
        "ack_max_ms": round(1000 * seconds[-1], 1),
        "spans_loaded_when_the_burst_ended": n_loaded_at_end,
        "loaded_spans_per_s": round(n_spans / (loaded_end - began)),
        "collector_cpu_s_in_burst": round(cpu_burst - cpu_before, 1),
        "spans_per_collector_cpu_s": round(n_spans / (cpu_loaded - cpu_before)),
        "peak_rss_mib": peak_mib,
        "stored_bytes_per_span": round(store_bytes / n_spans),
    }


@contextmanager
def _collector(store: Path) -> Iterator[tuple[StoreAddress, "subprocess.Popen[bytes]"]]:
    command = [sys.executable, "-m", "trainspan_cli", "collector", "--store", str(store)]
    process = subprocess.Popen(
        [*command, "--grpc", "127.0.0.1:0", "--http", "off", "--flight", "127.0.0.1:0"], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while (address := running_collector(store)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the collector did not start (exit code {process.poll()})")
            time.sleep(0.02)
        yield address, process
    finally:
        process.terminate()
        process.wait(120)


def _burst(address: StoreAddress, seconds: float) -> list[float]:
    """Sends from all connections for that long; the seconds each answer took."""
    taken: list[float] = []
    stop_at = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_send, args=(address, stop_at, seed, taken), name=f"client-{seed}")
        for seed in range(_CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def _send(address: StoreAddress, stop_at: float, seed: int, taken: list[float]) -> None:
    body, trace_places, span_places = _request(seed)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(str(address.grpc), options=options) as channel:
        export = channel.unary_unary(_EXPORT)
        while (began := time.monotonic()) < stop_at:
            ids = os.urandom(16 + 8 * _SPANS)
            for place in trace_places:
                body[place : place + 16] = ids[:16]
            for index, place in enumerate(span_places):
                body[place : place + 8] = ids[16 + 8 * index : 24 + 8 * index]
            export(bytes(body), timeout=60)
            taken.append(time.monotonic() - began)


def _request(seed: int) -> tuple[bytearray, list[int], list[int]]:
    """A serialised request, and where in it each trace id and span id stands."""
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.add(key="service.name").value.string_value = "policy"
    scope_spans = resource_spans.scope_spans.add()
    generator = random.Random(seed)
    scope_spans.spans.extend(_span(generator, index) for index in range(_SPANS))
    body = request.SerializeToString()
    return bytearray(body), list(_places(body, _TRACE_MARK)), list(_places(body, _SPAN_MARK))


def _span(generator: random.Random, index: int) -> Span:
    now = time.time_ns()
    span = Span(
        trace_id=_TRACE_MARK,
        span_id=_SPAN_MARK,
        name="chat policy",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=now,
        end_time_unix_nano=now + 10**8,
    )
    for key, text in {
        keys.ROLLOUT_ID: f"r{index}",
        keys.RUN_ID: "bench",
        keys.TASK_ID: "t",
        keys.SPLIT: "train",
    }.items():
        span.attributes.add(key=key).value.string_value = text
    for key, number in {keys.ATTEMPT: 0, keys.ROUND: 1, keys.CALL_INDEX: index, keys.POLICY_VERSION: 1}.items():
        span.attributes.add(key=key).value.int_value = number
    tokens = {
        keys.PROMPT_TOKEN_IDS: encode_ids(generator.randrange(50_000) for _ in range(500)),
        keys.COMPLETION_TOKEN_IDS: encode_ids(generator.randrange(50_000) for _ in range(200)),
        keys.COMPLETION_LOGPROBS: encode_logprobs(-generator.random() for _ in range(200)),
    }
    for key, packed in tokens.items():
        span.attributes.add(key=key).value.bytes_value = packed
    messages = span.attributes.add(key=keys.GEN_AI_INPUT_MESSAGES).value
    words = (f"{generator.randrange(10**6):x} of the" for _ in iter(int, 1))
    text = ""
    while span.ByteSize() + len(text) < _SPAN_BYTES - 3:
        text += f" {next(words)}"
    messages.string_value = text
    return span


def _places(body: bytes, mark: bytes) -> Iterator[int]:
    place = -1
    while (place := body.find(mark, place + 1)) >= 0:
        yield place


def _count(address: StoreAddress, *, wait_ms: int) -> int:
    ticket = {"sql": "SELECT count(*) AS n FROM spans", "wait_ms": wait_ms}
    table = flight.connect(f"grpc://{address.flight}").do_get(flight.Ticket(json.dumps(ticket).encode())).read_all()
    count: int = table["n"][0].as_py()
    return count


def _cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def _disk_limits(folder: Path) -> dict[str, Any]:
    """What the journal cannot exceed here: syncs per second of small writes, MiB per second of large ones."""
    result: dict[str, Any] = {}
    for name, n_bytes in (("fdatasync_4_kib_per_s", 4096), ("fdatasync_512_kib_per_s", 512 * 1024)):
        descriptor = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        data, began, n_syncs = os.urandom(n_bytes), time.monotonic(), 0
        while time.monotonic() - began < 1:
            os.write(descriptor, data)
            os.fdatasync(descriptor)
            n_syncs += 1
        os.close(descriptor)
        result[name] = round(n_syncs / (time.monotonic() - began))
    return result


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
