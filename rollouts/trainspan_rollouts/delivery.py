"""Sends verdicts to their collectors until these acknowledge them.

A verdict is the span of a finished attempt, with its scores as events. While its collector is unreachable, it waits in
memory, and `on_waiting` records it on disk, so that a run that ends first can be resumed.
"""

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.store.collectors import Collectors, address_of
from trainspan_schemas.store.endpoint import headers_of
from trainspan_schemas.telemetry import keys

__all__ = ["VerdictSender", "VerdictSenders"]

EXPORT_TIMEOUT_S: Final = 5.0
LATE_S: Final = 0.5
"""Extra time for an export beyond its timeout."""
BATCH: Final = 256
DELAY_S: Final = 0.2
"""How long a verdict waits for others, to be sent in one batch."""
MAX_BACKOFF_S: Final = 2.0
_ADVICE: Final = "give the runner a token of its role"
_ASK_S: Final = 2.0
_EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_DENIALS: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

_log = logging.getLogger(__name__)


class VerdictSenders(SpanProcessor):
    """A sender for each collector, so that one that is down delays no verdict of the others.

    Arguments as for `VerdictSender`; `headers` and `advice` get the collector's URL.
    """

    def __init__(
        self,
        collectors: Collectors,
        headers: Callable[[str], str | None],
        on_delivered: Callable[[ReadableSpan], None],
        on_waiting: Callable[[ReadableSpan], None],
        advice: Callable[[str], str] = lambda _url: _ADVICE,
    ) -> None:
        self._collectors = collectors
        self._senders = {
            url: VerdictSender(
                url, functools.partial(headers, url), on_delivered, on_waiting, functools.partial(advice, url)
            )
            for url in collectors.urls
        }

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span for the collector of its rollout; never blocks."""
        self._senders[self._url_of(span)].on_end(span)

    def resend(self, spans: Sequence[ReadableSpan]) -> None:
        """Queues spans that an earlier process of the run could not deliver; they are on disk already."""
        for url, sender in self._senders.items():
            sender.resend([span for span in spans if self._url_of(span) == url])

    def close(self, timeout_s: float) -> int:
        """Sends the rest for up to about `timeout_s`; returns the number of verdicts that were not acknowledged."""
        for sender in self._senders.values():
            sender.end_within(timeout_s)
        return sum(sender.close() for sender in self._senders.values())

    def shutdown(self) -> None:
        """Called by the provider; `close` does the work."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def _url_of(self, span: ReadableSpan) -> str:
        return self._collectors.url_for(str((span.attributes or {})[keys.ROLLOUT_ID]))


class VerdictSender:
    """A queue for one collector, and the thread that drains it. Nothing is dropped.

    A batch that fails is halved, and a span that fails alone goes to the end: one that is refused holds up no other.

    `headers()` is called before each connection and returns a value as in OTEL_EXPORTER_OTLP_HEADERS; None: that
    variable. `advice()` says what to do if the collector refuses the token.
    `on_delivered` and `on_waiting` are called in the thread, the latter once per span that was not delivered at the first
    attempt.
    """

    def __init__(
        self,
        collector: str,
        headers: Callable[[], str | None],
        on_delivered: Callable[[ReadableSpan], None],
        on_waiting: Callable[[ReadableSpan], None],
        advice: Callable[[], str] = lambda: _ADVICE,
    ) -> None:
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").setLevel(logging.CRITICAL)  # logged here
        self._collector, self._headers, self._advice = collector, headers, advice
        self._on_delivered, self._on_waiting = on_delivered, on_waiting
        self._queue: deque[ReadableSpan] = deque()
        self._most = BATCH
        """Spans of the next batch: fewer after a failure."""
        self._noted = 0
        """Number of spans from the left of the queue that were passed to `on_waiting`."""
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._exporter: OTLPSpanExporter | None = None
        self._thread = threading.Thread(target=self._run, name="trainspan-verdicts", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span; never blocks."""
        with self._changed:
            self._queue.append(span)
            self._changed.notify()

    def resend(self, spans: Sequence[ReadableSpan]) -> None:
        """Queues spans that an earlier process of the run could not deliver; they are on disk already."""
        with self._changed:
            self._queue.extendleft(reversed(spans))
            self._noted += len(spans)
            self._changed.notify()

    def end_within(self, timeout_s: float) -> None:
        """Has the thread end once all is sent, or after about `timeout_s`."""
        with self._changed:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout_s
            self._changed.notify()

    def close(self) -> int:
        """Waits for the thread to end; returns the number of verdicts that were not acknowledged."""
        self._thread.join()
        self._disconnect()
        return len(self._queue)

    def _run(self) -> None:
        backoff_s, away_since, denied = DELAY_S, 0.0, ""
        while batch := self._next_batch():
            if self._send(batch):
                if away_since:
                    _log.warning("event=collector_back seconds_away=%.0f", time.monotonic() - away_since)
                backoff_s, away_since = DELAY_S, 0.0
                self._most = min(BATCH, 2 * self._most)
                with self._changed:
                    for _ in batch:
                        self._queue.popleft()
                    self._noted = max(0, self._noted - len(batch))
                self._note(batch, self._on_delivered)
                continue
            denial = self._denial()
            if denial and denial != denied:
                denied = denial
                _log.error("event=verdicts_denied collector=%s error=%s; %s", self._collector, denial, self._advice())
            elif not away_since and not denial:
                _log.warning("event=verdicts_wait collector=%s: they will be sent when it answers", self._collector)
            away_since = away_since or time.monotonic()
            self._note_waiting()
            self._most = max(1, len(batch) // 2)
            with self._changed:
                if len(batch) == 1 and self._noted == len(self._queue):  # `_noted` counts from the left
                    self._queue.rotate(-1)
            with self._changed:
                if self._deadline is not None and (denial or time.monotonic() + backoff_s > self._deadline):
                    return
                self._changed.wait(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _next_batch(self) -> list[ReadableSpan]:
        """Returns the oldest spans, which stay queued until they are delivered; empty if all are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._deadline is not None)
            if len(self._queue) < self._most and self._deadline is None:
                self._changed.wait_for(lambda: len(self._queue) >= self._most or self._deadline is not None, DELAY_S)
            return [self._queue[index] for index in range(min(self._most, len(self._queue)))]

    def _note_waiting(self) -> None:
        with self._changed:
            fresh = [self._queue[index] for index in range(self._noted, len(self._queue))]
            self._noted = len(self._queue)
        self._note(fresh, self._on_waiting)

    def _note(self, spans: Sequence[ReadableSpan], on_span: Callable[[ReadableSpan], None]) -> None:
        for span in spans:
            try:
                on_span(span)
            except OSError as error:  # a full disk: the verdicts are still sent
                _log.warning("event=verdict_not_noted error=%s", error)

    def _send(self, batch: Sequence[ReadableSpan]) -> bool:
        timeout_s = EXPORT_TIMEOUT_S
        if self._deadline is not None:
            timeout_s = min(timeout_s, max(0.5, self._deadline - time.monotonic()))
        try:
            if self._exporter is None or timeout_s != EXPORT_TIMEOUT_S:
                self._disconnect()
                self._exporter = OTLPSpanExporter(endpoint=self._collector, timeout=timeout_s, headers=self._headers())
            arrived = self._export(self._exporter, batch, timeout_s)
        except Exception as error:  # noqa: BLE001  # a changing token file, an encoding error: the thread must survive
            _log.warning("event=verdicts_not_sent error=%r", error)
            arrived = False
        if not arrived:
            self._disconnect()  # the next connection reads the token again
        return arrived

    @staticmethod
    def _export(exporter: OTLPSpanExporter, batch: Sequence[ReadableSpan], timeout_s: float) -> bool:
        """Exports a batch; shuts a late exporter down, since up to 1.34 it retries for a minute despite its timeout."""
        late = threading.Timer(timeout_s + LATE_S, exporter.shutdown)
        late.daemon = True
        late.start()
        try:
            return exporter.export(batch) is SpanExportResult.SUCCESS
        finally:
            late.cancel()

    def _denial(self) -> str:
        """Why the collector refuses the token, which the exporter does not tell; empty if that is not the trouble."""
        try:
            target, headers = address_of(self._collector), self._headers()
            metadata = headers_of(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "") if headers is None else headers)
            if self._collector.startswith("https://"):
                roots = os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE")
                credentials = grpc.ssl_channel_credentials(Path(roots).read_bytes() if roots else None)
                channel = grpc.secure_channel(target, credentials)
            else:
                channel = grpc.insecure_channel(target)
            with channel:
                channel.unary_unary(_EXPORT)(b"", timeout=_ASK_S, metadata=tuple(metadata.items()))
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            return f"{code.name}: {error.details()}" if code in _DENIALS else ""
        except (OSError, ConfigError):  # a file that is being replaced
            pass
        return ""

    def _disconnect(self) -> None:
        if self._exporter is not None:
            self._exporter.shutdown()
            self._exporter = None
