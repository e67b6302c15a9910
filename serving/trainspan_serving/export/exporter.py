"""Sends call spans to the collector from its own thread, off the request path.

While the collector is unreachable or refuses the server's token, they wait on disk; they are sent oldest first once it
recovers, even after a restart of the server. A request that the collector refuses permanently is kept on disk and
retried at the next start. Queue and disk are bounded: beyond that the newest calls are dropped, counted and logged.
Since the server started: `captured` = `exported` + `dropped` + `refused` + calls waiting in memory or on disk
(`spooled`).
"""

import logging
import threading
import time
from collections.abc import Mapping

from trainspan_schemas.policy_server import CallCounts
from trainspan_serving.export.call_queue import CallQueue
from trainspan_serving.export.call_span import AttributeValue, CallSpan, encode_request
from trainspan_serving.export.collector_client import CollectorClient, Delivery
from trainspan_serving.export.spool import Spool

__all__ = ["Exporter"]

_log = logging.getLogger(__name__)

_RESOURCE: Mapping[str, AttributeValue] = {"service.name": "trainspan-serving"}
_REPORT_INTERVAL_S = 10.0
_MAX_BACKOFF_S = 2.0
_SLICE_S = 0.5
"""How long the spool is drained before new calls get a turn."""


class Exporter:
    """The thread that sends queued and spooled calls, and their counts.

    Without a client and a spool, calls are counted and dropped.
    """

    def __init__(
        self,
        client: CollectorClient | None,
        spool: Spool | None,
        *,
        max_calls: int = 20_000,
        max_bytes: int = 256 * 1024 * 1024,
        delay_s: float = 0.1,
        timeout_s: float = 10.0,
    ) -> None:
        self._delay_s, self._timeout_s = delay_s, timeout_s
        self._queue = CallQueue(max_calls, max_bytes)
        self._captured = self._exported = self._dropped = self._refused = 0
        self._reported_ns = 0
        self._counting = threading.Lock()
        self._deadline: float | None = None
        self._next_try = 0.0
        self._backoff_s = delay_s
        self._is_away = False
        self._trouble: str | None = None
        self._why_full = "the disk is slow"
        self._client, self._spool = client, spool
        self._thread: threading.Thread | None = None
        if client is None:
            self._queue.close()
        else:
            self._thread = threading.Thread(target=self._run, name="trainspan-export", daemon=True)
            self._thread.start()

    def add(self, span: CallSpan) -> None:
        """Queues a call, or drops it if the queue is full or closed; never blocks."""
        with self._counting:
            self._captured += 1
            if self._queue.put(span):
                return
            if self._queue.is_closed:
                self._dropped += 1
            else:
                self._drop(1, f"the queue is full, {self._why_full}")

    def counts(self) -> CallCounts:
        with self._counting:
            spooled, recovered = (self._spool.spans, self._spool.recovered) if self._spool else (0, 0)
            return CallCounts(self._captured, self._exported, self._dropped, spooled, recovered, self._refused)

    def trouble(self) -> str | None:
        """Returns why calls are waiting; None if they are not."""
        return self._trouble

    def end_within(self, timeout_s: float) -> None:
        """Has the thread end once all is sent, or after `timeout_s`; takes no more calls."""
        with self._counting:
            self._queue.close()  # before there is a deadline, at which the thread may end
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout_s

    def close(self, timeout_s: float) -> None:
        """Sends waiting calls for up to `timeout_s`; the rest stays on disk. Idempotent."""
        self.end_within(timeout_s)
        if self._thread is not None and self._client is not None:
            self._thread.join(timeout_s + 1.0)
            self._client.close()

    def _run(self) -> None:
        assert self._spool is not None
        while True:
            wait_s = max(0.0, self._next_try - time.monotonic()) if self._spool else None
            batch = self._queue.batch(wait_s, self._delay_s)
            is_stuck = bool(batch) and not self._settle(batch, self._spool)
            slice_end = min(time.monotonic() + _SLICE_S, self._deadline or float("inf"))
            while self._spool and self._next_try <= time.monotonic() < slice_end:
                self._empty_one(self._spool)
            if self._deadline is not None and self._has_ended(self._spool, is_stuck, self._deadline):
                return
            if is_stuck:
                self._queue.wait_closed(self._backoff_s)

    def _has_ended(self, spool: Spool, is_stuck: bool, deadline: float) -> bool:
        """Whether the thread can end while closing; drops queued calls that cannot be stored."""
        if self._queue and not (is_stuck and (self._is_away or time.monotonic() >= deadline)):
            return False
        if left := self._queue.clear():
            with self._counting:
                self._reported_ns = 0
                self._drop(left, "the collector was unreachable at shutdown, and the spool is full")
        return not spool or self._is_away or time.monotonic() >= deadline

    def _settle(self, batch: list[CallSpan], spool: Spool) -> bool:
        """Sends the batch, or spools it if others are waiting or the collector cannot take it now.

        Returns False if it could not be spooled either: it stays in the queue.
        """
        try:
            request = encode_request(batch, _RESOURCE).SerializeToString()
        except (ValueError, TypeError) as error:
            if len(batch) > 1:  # one by one, until the culprit is first
                return self._settle(batch[:1], spool)
            self._queue.remove(batch)
            with self._counting:
                self._drop(1, f"it cannot be encoded: {error}")
            return True
        delivery = Delivery(False) if spool else self._send(request, len(batch))
        if not delivery.settled and (reason := spool.put(request, len(batch))):
            self._why_full = reason
            return False
        lost = spool.put_refused(request, len(batch)) if delivery.refused else None
        self._queue.remove(batch)
        if delivery.settled:
            with self._counting:
                self._count(delivery, len(batch), lost)
        return True

    def _empty_one(self, spool: Spool) -> None:
        """Sends the oldest request of the spool."""
        try:
            spooled, request = spool.oldest()
        except OSError as error:
            self._note(Delivery(False, reason=f"cannot read the spool: {error}"))
            return
        if request is None:
            delivery = Delivery(True, spooled.spans, reason="their file in the spool is gone or damaged")
        else:
            delivery = self._send(request, spooled.spans)
        if not delivery.settled:
            return
        with self._counting:
            (spool.refuse if delivery.refused else spool.remove)(spooled)
            if not spooled.recovered:
                self._count(delivery, spooled.spans)
            elif delivery.refused or delivery.rejected:
                what = "refused" if delivery.refused else "dropped"
                count = spooled.spans if delivery.refused else delivery.rejected
                _log.warning("calls of an earlier server %s count=%d reason=%s", what, count, delivery.reason)

    def _send(self, request: bytes, spans: int) -> Delivery:
        assert self._client is not None
        timeout_s = self._timeout_s
        if self._deadline is not None:
            timeout_s = max(0.05, min(timeout_s, self._deadline - time.monotonic()))
        delivery = self._client.send(request, spans, timeout_s)
        self._note(delivery)
        return delivery

    def _note(self, delivery: Delivery) -> None:
        """Notes whether calls can be sent now, and when to try again if not."""
        if delivery.settled and self._is_away:
            _log.info("calls are sent again")
        if not delivery.settled:
            if not self._is_away:
                _log.warning("calls cannot be sent reason=%s: they wait on disk", delivery.reason)
            self._next_try = time.monotonic() + self._backoff_s
        self._backoff_s = self._delay_s if delivery.settled else min(2 * self._backoff_s, _MAX_BACKOFF_S)
        self._is_away = not delivery.settled
        self._trouble = None if delivery.settled else delivery.reason

    def _count(self, delivery: Delivery, spans: int, lost: str | None = None) -> None:
        """Counts a settled batch; `lost`: why a refused one could not be kept."""
        if delivery.refused and lost:
            self._drop(spans, f"{delivery.reason}, and they cannot be kept: {lost}")
        elif delivery.refused:
            self._refused += spans
            _log.error(
                "calls refused count=%d reason=%s: kept on disk, retried at the next start", spans, delivery.reason
            )
        else:
            self._exported += spans - delivery.rejected
        if delivery.rejected:
            self._drop(delivery.rejected, delivery.reason)

    def _drop(self, calls: int, reason: str) -> None:
        self._dropped += calls
        now_ns = time.monotonic_ns()
        if not self._reported_ns or now_ns - self._reported_ns > _REPORT_INTERVAL_S * 1e9:
            self._reported_ns = now_ns
            _log.warning("calls dropped count=%d total_dropped=%d reason=%s", calls, self._dropped, reason)
