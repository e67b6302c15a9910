"""What differs between the releases of OpenTelemetry that trainspan works with; everything else is the same in all of them.

The lowest release is named in pyproject.toml; `tests/end_to_end/agents/test_releases.py` runs agents with it and with the newest.
"""

import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry._logs import SeverityNumber, get_logger
from opentelemetry.sdk import _logs as sdk_logs

__all__ = ["bound_retries", "emit_event", "failure_result"]

_EXPORT_RESULTS: Final = ("SpanExportResult", "LogRecordExportResult", "LogExportResult")
"""The last one became the second in 1.39."""
_LogRecord: Final[Any] = getattr(sdk_logs, "LogRecord", None)
"""What a logger takes until 1.38; then it takes the parts."""


def emit_event(name: str, attributes: Mapping[str, str | int | float], span: trace.Span) -> None:
    """Sends a log record that is the event `name`, on `span`."""
    logger: Any = get_logger("trainspan")
    if _LogRecord is None:
        logger.emit(
            context=trace.set_span_in_context(span, context.get_current()),
            severity_number=SeverityNumber.INFO,
            attributes=attributes,
            event_name=name,
        )
    elif hasattr(logger, "resource"):  # the SDK's
        of_event = {**attributes, "event.name": name}  # as it was written before records had a field for it, until 1.34
        record = _LogRecord(
            timestamp=time.time_ns(),
            severity_number=SeverityNumber.INFO,
            attributes=of_event,
            resource=logger.resource,
        )
        parent = span.get_span_context()
        record.trace_id, record.span_id, record.trace_flags = parent.trace_id, parent.span_id, parent.trace_flags
        logger.emit(record)


def failure_result(exporters: ModuleType) -> Any:
    """What `export` returns in that module if it failed."""
    return next(getattr(exporters, name).FAILURE for name in _EXPORT_RESULTS if hasattr(exporters, name))


def bound_retries(exporters: ModuleType, left_s: Callable[[], float]) -> None:
    """Until 1.34 an export retries for a minute, whatever its timeout; now it raises TimeoutError when `left_s` is over."""
    if not hasattr(exporters, "_create_exp_backoff_generator"):
        return

    def sleep(delay_s: float) -> None:
        if delay_s > left_s():
            raise TimeoutError(f"no time for another try in {delay_s} s")
        time.sleep(delay_s)

    exporters.sleep = sleep  # type: ignore[attr-defined]
