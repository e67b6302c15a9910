"""A real collector process, a raw OTLP client, and reads through Flight."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pyarrow as pa
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pyarrow import flight

from trainspan_schemas.store.access import StoreAddress, running_collector

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"

ANY_PORT = "127.0.0.1:0"
_tokens: dict[str, str] = {}
"""HOST:PORT of OTLP/gRPC → the runner's token in the address file, for remembered collectors."""

Attribute = str | bool | int | float | bytes | list[Any] | dict[str, Any] | None


class CollectorProcess:
    """`trainspan collector` on a store, with free ports; `settings` become environment variables."""

    def __init__(
        self, store: Path, *arguments: str, faults: Path | None = None, log: str = "ERROR", **settings: object
    ) -> None:
        """`faults` is a folder with a `sitecustomize.py` that the process runs first (tests/support/collector/faults.py)."""
        self.store = store
        self.process = spawn_collector(store, *arguments, faults=faults, log=log, **settings)
        self.address = _wait_until_ready(store, self.process)

    def batcher_processes(self) -> list[int]:
        """Returns the pids of the batcher process, if it is running."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        children = [int(pid) for path in tasks.glob("*/children") for pid in path.read_text().split()]
        return [pid for pid in children if b"batcher_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self, timeout_s: float = 120) -> int:
        self.process.terminate()
        return self.process.wait(timeout_s)


def spawn_collector(
    store: Path, *arguments: str, faults: Path | None = None, log: str = "ERROR", **settings: object
) -> "subprocess.Popen[str]":
    """Starts the process without waiting until it is ready."""
    python_path = [str(faults)] if faults else []
    python_path += [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = {f"TRAINSPAN_COLLECTOR__{key.upper()}": str(value) for key, value in settings.items()}
    listeners = ("--grpc", ANY_PORT, "--flight", ANY_PORT)
    command = [sys.executable, "-m", "trainspan_cli", "collector", "--store", str(store), *listeners, *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "TRAINSPAN_LOG": log,
            "TRAINSPAN_HOME": str(store.parent),
            **environment,
            "PYTHONPATH": os.pathsep.join(python_path),
        },
    )


@contextmanager
def running(
    store: Path, *arguments: str, faults: Path | None = None, log: str = "ERROR", **settings: object
) -> Iterator[CollectorProcess]:
    """Runs a collector within the block."""
    collector = CollectorProcess(store, *arguments, faults=faults, log=log, **settings)
    try:
        yield collector
    finally:
        if collector.process.poll() is None:
            collector.terminate()


def _wait_until_ready(store: Path, process: "subprocess.Popen[str]", timeout_s: float = 120) -> StoreAddress:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        address = running_collector(store)
        if address is not None and address.pid == process.pid:
            remember(address)
            return address
        if process.poll() is not None:
            assert process.stderr is not None
            raise AssertionError(f"collector ended with {process.returncode}: {process.stderr.read()}")
        time.sleep(0.01)
    process.kill()
    raise AssertionError("collector not ready")


@contextmanager
def channel(address: StoreAddress) -> Iterator[grpc.Channel]:
    """Opens a channel to its OTLP listener, as the runner."""
    with open_channel(address) as opened:
        yield opened


def open_channel(
    address: StoreAddress, *, token: str | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Adds a token to every call: the runner's from its address file, or the given one; none if that is ""."""
    all_options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1), *options]
    opened = grpc.insecure_channel(str(address.grpc), options=all_options)
    shown = address.token if token is None else token
    return grpc.intercept_channel(opened, _Bearer(shown)) if shown else opened


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._metadata = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(self._with_token(details), requests)

    def _with_token(self, details: Any) -> "_Details":
        metadata = list(details.metadata or ())
        if not any(key == "authorization" for key, _ in metadata):
            metadata.append(self._metadata)
        return _Details(details.method, details.timeout, metadata, details.credentials)


class _Details(NamedTuple):
    """The fields of grpc.ClientCallDetails."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str]]
    credentials: Any
    wait_for_ready: bool | None = None
    compression: Any = None


def export(address: StoreAddress, *spans: Span, resource: Mapping[str, Attribute] | None = None) -> bytes:
    """Sends spans as one request; returns the raw response."""
    return send(address, TRACES, trace_request(*spans, resource=resource).SerializeToString())


def export_logs(address: StoreAddress, *records: LogRecord, resource: Mapping[str, Attribute] | None = None) -> bytes:
    request = ExportLogsServiceRequest()
    resource_logs = request.resource_logs.add()
    resource_logs.resource.attributes.extend(key_values(resource or {}))
    resource_logs.scope_logs.add().log_records.extend(records)
    return send(address, LOGS, request.SerializeToString())


def send(address: StoreAddress, method: str, body: bytes, **options: Any) -> bytes:
    with channel(address) as opened:
        answer: bytes = opened.unary_unary(method)(body, timeout=20, **options)
        return answer


def trace_request(*spans: Span, resource: Mapping[str, Attribute] | None = None) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.extend(key_values(resource or {}))
    resource_spans.scope_spans.add().spans.extend(spans)
    return request


def span(trace: int, number: int, attributes: Mapping[str, Attribute] | None = None, **fields: Any) -> Span:
    """Returns a span with ids made from two numbers."""
    given = {"name": "s", "start_time_unix_nano": 1_000, "end_time_unix_nano": 2_000, **fields}
    return Span(trace_id=trace_id(trace), span_id=span_id(number), attributes=key_values(attributes or {}), **given)


def event(name: str, attributes: Mapping[str, Attribute], time_ns: int = 1_500) -> Span.Event:
    return Span.Event(name=name, time_unix_nano=time_ns, attributes=key_values(attributes))


def trace_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def span_id(number: int) -> bytes:
    return number.to_bytes(8, "big")


def key_values(attributes: Mapping[str, Attribute]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def any_value(value: Attribute) -> AnyValue:
    result = AnyValue()
    if isinstance(value, bool):
        result.bool_value = value
    elif isinstance(value, int):
        result.int_value = value
    elif isinstance(value, float):
        result.double_value = value
    elif isinstance(value, str):
        result.string_value = value
    elif isinstance(value, bytes):
        result.bytes_value = value
    elif isinstance(value, list):
        result.array_value.SetInParent()
        result.array_value.values.extend(any_value(item) for item in value)
    elif isinstance(value, dict):
        result.kvlist_value.SetInParent()
        result.kvlist_value.values.extend(key_values(value))
    return result


def get(address: StoreAddress, ticket: object) -> pa.Table:
    """Returns the response to a Flight ticket."""
    with flight.connect(f"grpc://{address.flight}") as client:
        return client.do_get(flight.Ticket(json.dumps(ticket).encode()), call_options(address)).read_all()


def remember(address: StoreAddress) -> None:
    """Registers this collector's token for `runner_metadata`."""
    _tokens[str(address.grpc)] = str(address.token)


def runner_metadata(grpc_address: str) -> list[tuple[str, str]]:
    """Returns gRPC metadata that identifies the sender as the runner to a remembered collector."""
    token = _tokens.get(grpc_address)
    return [("authorization", f"Bearer {token}")] if token else []


def call_options(address: StoreAddress) -> flight.FlightCallOptions:
    """Returns Flight call options with the token from the address file."""
    return flight.FlightCallOptions(headers=address.endpoint.call_headers)


def read(address: StoreAddress, name: str, **parameters: object) -> list[dict[str, Any]]:
    """Returns the rows of a named read, in order of `seq` if they have one."""
    rows: list[dict[str, Any]] = get(address, {"read": name, "parameters": parameters}).to_pylist()
    return sorted(rows, key=lambda row: row.get("seq", 0))


def select(address: StoreAddress, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in get(address, {"sql": sql}).to_pylist()]
