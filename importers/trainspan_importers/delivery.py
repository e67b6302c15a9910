"""Sends spans and log records to the collectors over OTLP/gRPC until these acknowledge them."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from trainspan_importers.traces import Item
from trainspan_schemas.errors import ConfigError, StoreError
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry import keys

__all__ = ["Delivery"]

_TRACES: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_LOGS: Final = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
_MOST_ITEMS: Final = 2048
_MOST_BYTES: Final = 1024 * 1024
_IN_FLIGHT: Final = 4
_TIMEOUT_S: Final = 60.0
_FIRST_PATIENCE_S: Final = 10.0
_PATIENCE_S: Final = 300.0
"""How long a collector may be away, or slow senders down, before and after its first answer."""
_TEMPORARY: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
)
_REFUSED: Final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
_DENIED: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class Delivery:
    """Batches for each collector, a few requests of each at a time.

    `headers(url)` returns a value as in OTEL_EXPORTER_OTLP_HEADERS; `advice(url)` what to do if the token is refused;
    `on_refused(reason, n)` is called with the number of items that a collector refused. Raises StoreError if a collector does not
    answer at first, is away for five minutes later, or refuses the token, ConfigError if `certificate` (PEM) cannot be read.
    """

    def __init__(
        self,
        collectors: Collectors,
        headers: Callable[[str], str | None],
        certificate: str | None,
        advice: Callable[[str], str],
        on_refused: Callable[[str, int], None],
    ) -> None:
        self._collectors = collectors
        self._lines = {url: _Line(url, headers(url), certificate, advice(url), on_refused) for url in collectors.urls}

    def send(self, item: Item) -> None:
        """Queues an item; waits while too many requests are unanswered."""
        lines = self._lines
        line = next(iter(lines.values())) if len(lines) == 1 else lines[self._collectors.url_for(_key(item))]
        line.add(item)

    def flush(self) -> None:
        """Returns once everything is acknowledged."""
        for line in self._lines.values():
            line.flush()

    def close(self) -> None:
        for line in self._lines.values():
            line.close()


def _key(item: Item) -> str:
    rollout_id = next((pair.value.string_value for pair in item.message.attributes if pair.key == keys.ROLLOUT_ID), "")
    return rollout_id or bytes(item.message.trace_id).hex()


@dataclass(slots=True)
class _Batch:
    """One request: the items of one signal."""

    method: str
    items: list[Item] = field(default_factory=list)
    n_bytes: int = 0

    def add(self, item: Item) -> bool:
        """Whether the batch is full now."""
        self.items.append(item)
        self.n_bytes += item.message.ByteSize()
        return len(self.items) >= _MOST_ITEMS or self.n_bytes >= _MOST_BYTES

    def request(self) -> bytes:
        """The items in OTLP; those that follow each other from one origin share its resource and scope."""
        is_trace = self.method == _TRACES
        request: Any = ExportTraceServiceRequest() if is_trace else ExportLogsServiceRequest()
        origin, group = None, None
        for item in self.items:
            if item.origin is not origin:
                origin = item.origin
                outer = (request.resource_spans if is_trace else request.resource_logs).add()
                outer.resource.CopyFrom(origin.resource)
                outer.schema_url = origin.resource_schema
                group = (outer.scope_spans if is_trace else outer.scope_logs).add()
                group.schema_url = origin.scope_schema
                if origin.scope is not None:
                    group.scope.CopyFrom(origin.scope)
            assert group is not None
            (group.spans if is_trace else group.log_records).append(item.message)
        return bytes(request.SerializeToString())

    def halves(self) -> "list[_Batch]":
        middle = len(self.items) // 2
        return [_Batch(self.method, part) for part in (self.items[:middle], self.items[middle:])]


class _Line:
    """One collector."""

    def __init__(
        self,
        url: str,
        headers: str | None,
        certificate: str | None,
        advice: str,
        on_refused: Callable[[str, int], None],
    ) -> None:
        self._url, self._advice, self._on_refused = url, advice, on_refused
        pairs = (pair.split("=", 1) for pair in (headers or "").split(",") if "=" in pair)
        self._metadata = tuple((unquote(name).strip().lower(), unquote(value)) for name, value in pairs)
        parts = urlsplit(url)
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        if parts.scheme == "https":
            credentials = grpc.ssl_channel_credentials(_roots(certificate))
            self._channel = grpc.secure_channel(parts.netloc, credentials, options=options)
        else:
            self._channel = grpc.insecure_channel(parts.netloc, options=options)
        self._calls = {method: self._channel.unary_unary(method) for method in (_TRACES, _LOGS)}
        self._pending: deque[tuple[_Batch, Any]] = deque()
        self._patience_s = _FIRST_PATIENCE_S
        self._reset()

    def add(self, item: Item) -> None:
        batch = self._batches[_TRACES if isinstance(item.message, Span) else _LOGS]
        if batch.add(item):
            self._batches[batch.method] = _Batch(batch.method)
            self._start(batch)

    def flush(self) -> None:
        batches = [batch for batch in self._batches.values() if batch.items]
        self._reset()
        for batch in batches:
            self._start(batch)
        while self._pending:
            self._finish_first()

    def close(self) -> None:
        self._channel.close()

    def _reset(self) -> None:
        self._batches = {method: _Batch(method) for method in (_TRACES, _LOGS)}

    def _start(self, batch: _Batch) -> None:
        while len(self._pending) >= _IN_FLIGHT:
            self._finish_first()
        self._pending.append((batch, self._call(batch)))

    def _call(self, batch: _Batch) -> Any:
        return self._calls[batch.method].future(batch.request(), timeout=_TIMEOUT_S, metadata=self._metadata)

    def _finish_first(self) -> None:
        """Waits for the oldest request; sends it again while the collector cannot take it, and in halves if it refuses it."""
        batch, call = self._pending[0]
        deadline, pause_s = time.monotonic() + self._patience_s, 0.2
        while True:
            error = call.exception()
            if error is None:
                self._patience_s = _PATIENCE_S
                self._count_rejected(batch, call.result())
                break
            code = error.code()
            if code in _TEMPORARY and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                call = self._call(batch)
                continue
            if code not in _REFUSED:
                advice = (
                    self._advice if code in _DENIED else "is it running? then import again: nothing is stored twice"
                )
                raise StoreError(
                    f"the collector at {self._url} did not take the spans ({code.name}: {error.details()}): {advice}"
                )
            self._pending.popleft()
            if len(batch.items) == 1:
                self._on_refused(f"refused by the collector: {error.details()}", 1)
            else:
                self._pending.extendleft((half, self._call(half)) for half in reversed(batch.halves()))
            return
        self._pending.popleft()

    def _count_rejected(self, batch: _Batch, answer: bytes) -> None:
        if not answer:
            return
        if batch.method == _TRACES:
            partial = ExportTraceServiceResponse.FromString(answer).partial_success
            n_rejected = partial.rejected_spans
        else:
            partial = ExportLogsServiceResponse.FromString(answer).partial_success
            n_rejected = partial.rejected_log_records
        if n_rejected:
            self._on_refused(f"refused by the collector: {partial.error_message}", n_rejected)


def _roots(certificate: str | None) -> bytes | None:
    try:
        return Path(certificate).read_bytes() if certificate else None
    except OSError as error:
        raise ConfigError(f"cannot read the collector's certificate {certificate}: {error.strerror}") from error
