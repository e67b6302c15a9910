"""The collector's metrics, for Prometheus. Every name begins with `trainspan_collector_`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "LoadCounts", "Metrics", "RefusalReason", "StoreState"]

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
disable_created_metrics()  # type: ignore[no-untyped-call]  # a creation time for each counter would double the page

_PREFIX: Final = "trainspan_collector_"
_COMMIT_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """What one batch added to the store."""

    duplicates: int = 0
    id_collisions: int = 0
    dialects: Mapping[str, int] | None = None
    """Spans by the convention that they follow."""
    calls: int = 0
    untrainable_calls: Mapping[str, int] | None = None
    """Calls by what they lack for training; a call that lacks several things counts once, by the first."""
    stale_calls: int = 0
    """Trusted calls of an older policy version than the newest one seen for that policy."""


class RefusalReason(StrEnum):
    """Why a request was refused: the label `reason`."""

    INVALID = "invalid"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD = "method"
    MEDIA_TYPE = "media_type"
    MEMORY = "memory"
    BEHIND = "behind"
    DISK_FULL = "disk_full"
    WRITE_FAILED = "write_failed"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class StoreState:
    """The current state of the store; bytes and seconds."""

    ready: bool
    inflight_bytes: int
    queued_requests: int
    last_commit_age_s: float
    """Time since a request was last written to the journal."""
    journal_bytes: int
    loader_lag_bytes: int
    loader_lag_s: float
    """Age of the oldest request that is not loaded."""
    backlog_s: float
    """How long loading the backlog will take."""
    disk_free_bytes: int
    store_bytes: int
    quarantined_requests: int
    loads_put_off: int


class Metrics:
    """One registry per process. Thread-safe; it outlives the store, and `watch` connects the store's current state."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._state = _StateGauges()
        self._registry.register(self._state)
        self._accepted = self._counter("accepted_requests", "Requests acknowledged.", "signal", "transport")
        self._items = self._counter("accepted_items", "Spans, log records or metrics requests acknowledged.", "signal")
        self._refused = self._counter("refused_requests", "Requests refused.", "transport", "reason")
        self._rejected = self._counter(
            "rejected_items", "Spans and log records refused one by one.", "signal", "reason"
        )
        redacted = self._counter("redacted_values", "Values removed before storing.", "kind")
        self._secrets, self._blocked = redacted.labels("secret"), redacted.labels("blocked")
        self._repaired = self._counter("repaired_texts", "Texts that were not valid UTF-8, stored with escapes.")
        self._commit_s = Histogram(
            _PREFIX + "commit_seconds",
            "Time to write and sync one group of requests.",
            registry=self._registry,
            buckets=_COMMIT_BUCKETS_S,
        )
        self._duplicates = self._counter("duplicates", "Spans, log records and evaluations that were already stored.")
        self._collisions = self._counter("id_collisions", "Spans with the ids of another span.")
        self._dialects = self._counter("spans", "Spans loaded, by convention.", "dialect")
        self._calls = self._counter("calls", "Spans loaded that carry token ids.")
        self._untrainable = self._counter("untrainable_calls", "Calls that cannot be trained on.", "reason")
        self._stale = self._counter("stale_calls", "Calls of an older policy version than the newest seen.")

    def accepted(self, signal: str, transport: str, n_items: int) -> None:
        self._accepted.labels(signal, transport).inc()
        self._items.labels(signal).inc(n_items)

    def refused(self, transport: str, reason: RefusalReason) -> None:
        self._refused.labels(transport, reason.value).inc()

    def rejected(self, signal: str, reasons: Mapping[str, int]) -> None:
        """Counts rejected items of an accepted request, by reason."""
        for reason, n_items in reasons.items():
            self._rejected.labels(signal, reason).inc(n_items)

    def redacted(self, n_secrets: int, n_blocked: int) -> None:
        self._secrets.inc(n_secrets)
        self._blocked.inc(n_blocked)

    def repaired(self, n_texts: int) -> None:
        self._repaired.inc(n_texts)

    def committed(self, seconds: float) -> None:
        """Counts a group of requests that is now on disk."""
        self._commit_s.observe(seconds)

    def loaded(self, counts: LoadCounts) -> None:
        self._duplicates.inc(counts.duplicates)
        self._collisions.inc(counts.id_collisions)
        for dialect, n_spans in (counts.dialects or {}).items():
            self._dialects.labels(dialect).inc(n_spans)
        self._calls.inc(counts.calls)
        for reason, n_calls in (counts.untrainable_calls or {}).items():
            self._untrainable.labels(reason).inc(n_calls)
        self._stale.inc(counts.stale_calls)

    def watch(self, state: Callable[[], StoreState] | None) -> None:
        """From now on, `state` returns the store's state; None: no store is open."""
        self._state.read = state

    def text(self) -> bytes:
        """The exposition, in the format of CONTENT_TYPE."""
        text: bytes = generate_latest(self._registry)
        return text

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, help_text, labels, registry=self._registry)


class _StateGauges(Collector):
    """Gauges that are read when scraped."""

    def __init__(self) -> None:
        self.read: Callable[[], StoreState] | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        state = self.read() if self.read is not None else None
        yield GaugeMetricFamily(_PREFIX + "ready", "Whether requests are accepted.", value=bool(state and state.ready))
        if state is None:
            return
        for name, help_text, value in (
            ("inflight_bytes", "Requests held in memory.", state.inflight_bytes),
            ("queued_requests", "Requests waiting to be written to disk.", state.queued_requests),
            ("last_commit_age_seconds", "Time since requests were last synced to disk.", state.last_commit_age_s),
            ("journal_bytes", "Size of the journal.", state.journal_bytes),
            ("loader_lag_bytes", "Part of the journal that is not loaded yet.", state.loader_lag_bytes),
            ("loader_lag_seconds", "Age of the oldest request that is not loaded.", state.loader_lag_s),
            ("backlog_seconds", "Estimated time to load the backlog.", state.backlog_s),
            ("disk_free_bytes", "Free disk space at the store.", state.disk_free_bytes),
            ("store_bytes", "Size of the DuckDB file and its write-ahead log.", state.store_bytes),
            ("quarantined_requests", "Requests quarantined since the start.", state.quarantined_requests),
            ("loads_put_off", "Loads retried because open files, memory or disk space ran short.", state.loads_put_off),
        ):
            yield GaugeMetricFamily(_PREFIX + name, help_text, value=value)
