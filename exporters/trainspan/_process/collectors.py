"""Sends each rollout to its collector from a process with many rollouts, if there are several collectors.

The SDK's exporters send to one collector. Here each other collector gets batch processors of its own: a queue and a thread,
so that one that is down does not delay the others. `belonging` then leaves to each exporter what belongs to its collector.
A signal that the SDK does not send over gRPC is not divided: all of it goes where the program sends it.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from opentelemetry import trace
from opentelemetry._logs import get_logger_provider
from opentelemetry.sdk.trace import ReadableSpan

from trainspan._guard import guarded
from trainspan._releases import Forwarding, hand_record
from trainspan_schemas.store.collectors import ENV_COLLECTORS, Collectors, address_of
from trainspan_schemas.telemetry import keys

__all__ = ["RECORDS", "SPANS", "addresses", "begin_flush", "belonging", "divide_rollouts", "end_flush"]

SPANS: Final = "spans"
RECORDS: Final = "log records"
_GENERAL: Final = "OTEL_EXPORTER_OTLP"


class _Division:
    collectors: Collectors | None = None
    """None: there is only one."""
    others: "Mapping[str, _Other]" = MappingProxyType({})
    """URL → collector, without the one that the SDK's exporters send to."""
    kinds: frozenset[str] = frozenset()
    """What is divided: SPANS, RECORDS, or both."""


class _Other:
    """A collector that the SDK's exporters do not send to."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.spans: Any = None
        self.records: Any = None
        self._wanted, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._flush_when_wanted, name="trainspan-flush", daemon=True)
        self._thread.start()

    def take_spans(self) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self.spans = BatchSpanProcessor(OTLPSpanExporter(endpoint=self._url))

    def take_records(self) -> None:
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

        self.records = BatchLogRecordProcessor(OTLPLogExporter(endpoint=self._url))

    def begin_flush(self) -> None:
        """Has a thread of its own send all that is queued; none can be started while the interpreter ends."""
        self._done.clear()
        if self._thread.is_alive():
            self._wanted.set()
        else:  # in a forked child
            self._flush()

    def end_flush(self, timeout_s: float) -> None:
        self._done.wait(max(0.0, timeout_s))

    def _flush_when_wanted(self) -> None:
        while self._wanted.wait():
            self._wanted.clear()
            self._flush()

    @guarded
    def _flush(self) -> None:
        for processor in (self.spans, self.records):
            if processor is not None:
                processor.force_flush()
        self._done.set()


def divide_rollouts() -> None:
    """Divides spans and log records among the collectors in `TRAINSPAN_COLLECTORS`; does nothing if there is one."""
    urls = os.environ.get(ENV_COLLECTORS)
    if not urls:
        return
    collectors = Collectors.of(urls)
    own_address = address_of(os.environ[f"{_GENERAL}_ENDPOINT"])
    others = {url: _Other(url) for url in collectors.urls if address_of(url) != own_address}
    if len(others) == len(collectors.urls):
        return  # the program has a collector of its own
    _Division.collectors, _Division.others = collectors, others
    if _is_sent("TRACES"):
        for other in others.values():
            other.take_spans()
        trace.get_tracer_provider().add_span_processor(_divided(_hand_span, lambda other: other.spans))  # type: ignore[attr-defined]
        _Division.kinds |= {SPANS}
    if _is_sent("LOGS"):
        for other in others.values():
            other.take_records()
        get_logger_provider().add_log_record_processor(_divided(_hand_record, lambda other: other.records))  # type: ignore[attr-defined]
        _Division.kinds |= {RECORDS}


def _divided(hand: Callable[[Any], None], processor_of: Callable[[_Other], Any]) -> Forwarding:
    """Hands on what belongs to the others. Its shutdown does nothing: the process sends everything at its end."""

    def flush(timeout_millis: int) -> bool:
        return all(processor_of(other).force_flush(timeout_millis) for other in _Division.others.values())

    return Forwarding(hand, flush, lambda: None)


@guarded
def belonging(address: str, kind: str, items: Sequence[Any]) -> Sequence[Any]:
    """The items of a kind, SPANS or RECORDS, that belong to the collector at `address`.

    All, if it is none of several, but the user's own, or if this kind is not divided.
    """
    collectors = _Division.collectors
    own_address = address_of(address)
    if collectors is None or kind not in _Division.kinds or own_address not in addresses():
        return items
    return [item for item in items if address_of(collectors.url_for(_key(item))) == own_address]


def addresses() -> set[str]:
    """`HOST:PORT` of all collectors; empty if there is only one."""
    return {address_of(url) for url in _Division.collectors.urls} if _Division.collectors else set()


def begin_flush() -> None:
    """Begins to send all that is queued for the others, beside the SDK's own flush."""
    for other in _Division.others.values():
        other.begin_flush()


def end_flush(deadline_s: float) -> None:
    """Waits for it until `deadline_s` on the monotonic clock."""
    for other in _Division.others.values():
        other.end_flush(deadline_s - time.monotonic())


def _is_sent(signal: str) -> bool:
    """Whether the SDK sends this signal to the collector, over gRPC. It reads names and protocol in the same way."""
    if os.environ.get(f"{_GENERAL}_{signal}_ENDPOINT"):
        return False
    protocol = os.environ.get(f"{_GENERAL}_{signal}_PROTOCOL") or os.environ.get(f"{_GENERAL}_PROTOCOL") or "grpc"
    names = {name.strip() for name in os.environ.get(f"OTEL_{signal}_EXPORTER", "").split(",")}
    return "otlp_proto_grpc" in names or ("otlp" in names and protocol.strip() == "grpc")


@guarded
def _hand_span(span: ReadableSpan) -> None:
    if (other := _other(span)) and other.spans:
        other.spans.on_end(span)


@guarded
def _hand_record(record: Any) -> None:
    if (other := _other(record)) and other.records:
        hand_record(other.records, record)


def _other(item: Any) -> _Other | None:
    assert _Division.collectors is not None
    return _Division.others.get(_Division.collectors.url_for(_key(item)))


def _key(item: Any) -> str:
    """The rollout id of a span or log record, or the id of its trace if it has none."""
    item = getattr(item, "log_record", item)
    rollout_id = (item.attributes or {}).get(keys.ROLLOUT_ID)
    if rollout_id:
        return str(rollout_id)
    context = item.context if isinstance(item, ReadableSpan) else item
    trace_id = context.trace_id if context else 0
    return f"{trace_id or 0:032x}"
