"""Sends call spans to the collector from a thread of its own, off the request path.

The queue is bounded; while the collector is out of reach it fills, then the newest calls are dropped, counted and logged.
What the collector refuses for good is dropped and counted too: `captured` = `exported` + `dropped` + what still waits.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from trainspan_schemas.errors import ConfigError

from .otlp import AttributeValue, CallSpan, encode_request

__all__ = ["Counts", "Exporter"]

_log = logging.getLogger(__name__)

_RESOURCE: Mapping[str, AttributeValue] = {"service.name": "trainspan-serving"}
_BATCH_SPANS = 512
_BATCH_BYTES = 2 * 1024 * 1024
_REPORT_INTERVAL_S = 10.0
_FINAL_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


@dataclass(frozen=True, slots=True)
class Counts:
    """Calls since the server started."""

    captured: int
    exported: int
    dropped: int


class Exporter:
    """A bounded queue and the thread that empties it over OTLP/gRPC.

    `endpoint` is a URL (`http://HOST:PORT`, or `https://` for TLS) or None: then calls are counted and dropped.
    `metadata` goes with every request (for example an authorization header).
    """

    def __init__(
        self,
        endpoint: str | None,
        *,
        metadata: tuple[tuple[str, str], ...] = (),
        max_calls: int = 20_000,
        max_bytes: int = 256 * 1024 * 1024,
        delay_s: float = 0.1,
        timeout_s: float = 10.0,
    ) -> None:
        self._metadata = metadata
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._delay_s, self._timeout_s = delay_s, timeout_s
        self._queue: deque[CallSpan] = deque()
        self._queued_bytes = 0
        self._captured = self._exported = self._dropped = 0
        self._reported_ns = 0
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._thread: threading.Thread | None = None
        if endpoint is not None:
            self._channel = _open_channel(endpoint)
            self._stub: Any = TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]
            self._thread = threading.Thread(target=self._run, name="trainspan-export", daemon=True)
            self._thread.start()

    def add(self, span: CallSpan) -> None:
        """Queues a call; never blocks. A full queue drops it."""
        size = span.size_bytes
        with self._changed:
            self._captured += 1
            if self._thread is None or self._deadline is not None:
                self._dropped += 1
                return
            if len(self._queue) >= self._max_calls or self._queued_bytes + size > self._max_bytes:
                self._drop(1, "the queue is full; is the collector running?")
                return
            self._queue.append(span)
            self._queued_bytes += size
            self._changed.notify()

    def counts(self) -> Counts:
        with self._changed:
            return Counts(self._captured, self._exported, self._dropped)

    def close(self, timeout_s: float) -> None:
        """Sends what is queued within `timeout_s`; the rest is dropped, counted and logged. Idempotent."""
        with self._changed:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout_s
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s + 1.0)
            self._channel.close()

    def _run(self) -> None:
        backoff_s = self._delay_s
        while True:
            batch = self._next_batch()
            if not batch:
                return
            if self._send(batch):
                backoff_s = self._delay_s
            elif not self._pause(backoff_s):
                self._give_up()
                return
            else:
                backoff_s = min(2 * backoff_s, 2.0)

    def _next_batch(self) -> list[CallSpan]:
        """The oldest calls, left in the queue until they are sent; empty when closing and nothing is left."""
        with self._changed:
            while not self._queue:
                if self._deadline is not None:
                    return []
                self._changed.wait()
            if len(self._queue) < _BATCH_SPANS and self._deadline is None:
                self._changed.wait_for(
                    lambda: self._deadline is not None or len(self._queue) >= _BATCH_SPANS, self._delay_s
                )
            batch: list[CallSpan] = []
            size = 0
            for span in self._queue:
                size += span.size_bytes
                if batch and (len(batch) == _BATCH_SPANS or size > _BATCH_BYTES):
                    break
                batch.append(span)
            return batch

    def _send(self, batch: list[CallSpan]) -> bool:
        """Whether the batch is settled: accepted, or refused for good."""
        try:
            request = encode_request(batch, _RESOURCE)
        except (ValueError, TypeError) as error:
            if len(batch) > 1:  # one by one, until the culprit comes first
                return self._send(batch[:1])
            with self._changed:
                self._take(batch)
                self._drop(1, f"it cannot be encoded: {error}")
            return True
        timeout_s = self._timeout_s
        if self._deadline is not None:
            timeout_s = max(0.05, min(timeout_s, self._deadline - time.monotonic()))
        try:
            answer = self._stub.Export(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code()
            if code not in _FINAL_CODES:
                _log.debug("export failed code=%s calls=%d", code, len(batch))
                return False
            with self._changed:
                self._take(batch)
                self._drop(len(batch), f"the collector refused them: {code.name} {error.details()}")
            return True
        rejected = min(answer.partial_success.rejected_spans, len(batch))
        with self._changed:
            self._take(batch)
            self._exported += len(batch) - rejected
            if rejected:
                self._drop(rejected, f"the collector rejected them: {answer.partial_success.error_message}")
        return True

    def _pause(self, seconds: float) -> bool:
        """Waits before the next try; False when closing leaves no time for one."""
        with self._changed:
            if self._deadline is None:
                self._changed.wait_for(lambda: self._deadline is not None, seconds)
                return True
        time.sleep(0.05)
        return time.monotonic() < self._deadline

    def _take(self, batch: list[CallSpan]) -> None:
        for span in batch:
            self._queue.popleft()
            self._queued_bytes -= span.size_bytes

    def _give_up(self) -> None:
        with self._changed:
            left = len(self._queue)
            self._queue.clear()
            self._reported_ns = 0
            self._drop(left, "the collector was out of reach at shutdown")

    def _drop(self, calls: int, reason: str) -> None:
        self._dropped += calls
        now_ns = time.monotonic_ns()
        if not self._reported_ns or now_ns - self._reported_ns > _REPORT_INTERVAL_S * 1e9:
            self._reported_ns = now_ns
            _log.warning("calls dropped count=%d total_dropped=%d reason=%s", calls, self._dropped, reason)


def _open_channel(endpoint: str) -> grpc.Channel:
    url = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    if not url.hostname or url.scheme not in ("", "http", "https", "grpc"):
        raise ConfigError(f'serving.collector = {endpoint!r} is no URL: write http://HOST:PORT, or "none"')
    target = f"{url.hostname}:{url.port or 4317}"
    options = [
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if url.scheme == "https":
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(), options)
    return grpc.insecure_channel(target, options)
