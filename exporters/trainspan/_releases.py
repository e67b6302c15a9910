"""Handles all differences between the supported releases of OpenTelemetry.

pyproject.toml sets the lowest release; `tests/end_to_end/agents/test_releases.py` runs agents with it and with the
newest.
"""

import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry._logs import SeverityNumber, get_logger
from opentelemetry.sdk import _logs as sdk_logs
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

__all__ = [
    "Forwarding",
    "bound_retries",
    "emit_event",
    "failure_result",
    "hand_record",
    "processors_of",
    "renew_channel",
]

_EXPORT_RESULTS: Final = ("SpanExportResult", "LogRecordExportResult", "LogExportResult")
"""The last one became the second in 1.39."""
_LogRecord: Final[Any] = getattr(sdk_logs, "LogRecord", None)
"""The argument of a logger up to 1.38; later releases take its fields instead."""


def emit_event(name: str, attributes: Mapping[str, str | int | float], span: trace.Span) -> None:
    """Sends the event `name` as a log record on `span`."""
    logger: Any = get_logger("trainspan")
    if _LogRecord is None:
        logger.emit(
            context=trace.set_span_in_context(span, context.get_current()),
            severity_number=SeverityNumber.INFO,
            attributes=attributes,
            event_name=name,
        )
    elif hasattr(logger, "resource"):  # the SDK's
        of_event = {**attributes, "event.name": name}  # up to 1.34, records have no field for it
        record = _LogRecord(
            timestamp=time.time_ns(),
            severity_number=SeverityNumber.INFO,
            attributes=of_event,
            resource=logger.resource,
        )
        parent = span.get_span_context()
        record.trace_id, record.span_id, record.trace_flags = parent.trace_id, parent.span_id, parent.trace_flags
        logger.emit(record)


class Forwarding(SpanProcessor, sdk_logs.LogRecordProcessor):
    """Calls `take` with each span that ends or record that is emitted, `flush` with the milliseconds it has, and `shutdown`."""

    def __init__(
        self, take: Callable[[Any], None], flush: Callable[[int], object], shutdown: Callable[[], object]
    ) -> None:
        self._take, self._flush, self._shutdown = take, flush, shutdown

    def on_end(self, span: ReadableSpan) -> None:
        self._take(span)

    def on_emit(self, log_record: Any) -> None:
        self._take(log_record)

    emit = on_emit  # its name up to 1.34

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self._flush(timeout_millis))

    def shutdown(self) -> None:
        self._shutdown()


def hand_record(processor: Any, record: Any) -> None:
    """Hands a log record from one processor to another."""
    (processor.on_emit if hasattr(processor, "on_emit") else processor.emit)(record)


def processors_of(provider: object) -> tuple[Any, ...]:
    """Returns the span or log record processors of an SDK provider."""
    together = getattr(provider, "_active_span_processor", None) or getattr(
        provider, "_multi_log_record_processor", None
    )
    return (*getattr(together, "_span_processors", ()), *getattr(together, "_log_record_processors", ()))


def failure_result(exporters: ModuleType) -> Any:
    """Returns the value that `export` in this module returns on failure."""
    return next(getattr(exporters, name).FAILURE for name in _EXPORT_RESULTS if hasattr(exporters, name))


def renew_channel(exporter: Any) -> None:
    """Gives an exporter a new channel, after a failure.

    Earlier releases keep theirs, which waits up to two minutes before it connects again; later ones renew it themselves.
    """
    if hasattr(exporter, "_initialize_channel_and_stub") or not hasattr(exporter, "_stub"):  # the latter: HTTP
        return
    fresh = type(exporter)()  # from the environment, as the SDK makes it
    if (fresh._endpoint, fresh._headers) == (exporter._endpoint, exporter._headers):
        exporter._client = fresh._client


def bound_retries(exporters: ModuleType, left_s: Callable[[], float]) -> None:
    """Up to 1.34, an export retries for a minute whatever its timeout; makes it raise TimeoutError after `left_s`."""
    if not hasattr(exporters, "_create_exp_backoff_generator"):
        return

    def sleep(delay_s: float) -> None:
        if delay_s > left_s():
            raise TimeoutError(f"no time left for a retry in {delay_s} s")
        time.sleep(delay_s)

    exporters.sleep = sleep  # type: ignore[attr-defined]
