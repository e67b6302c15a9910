"""The backend that a program's `OTEL_EXPORTER_OTLP_*` name, beside the collector.

A program that sets up OpenTelemetry itself reads these variables and sends there. Any other program relies on the command's
providers: these get exporters for the backend, which rest once the program sets a provider of its own.
"""

import os
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import trace
from opentelemetry._logs import get_logger_provider
from opentelemetry.sdk._logs import LogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from trainspan._guard import guarded
from trainspan._process.providers import first_providers
from trainspan._releases import hand_record
from trainspan._rollout.span_processor import add_processor
from trainspan._switch import is_disabled
from trainspan_schemas.store.otlp_variables import ENV_COLLECTOR, ENV_PROGRAM, exchange

__all__ = ["feed_own_backend", "set_up_for_collector"]


@guarded
def set_up_for_collector() -> None:
    """Gives the SDK the collector's variables in a child process, before it is set up."""
    if not is_disabled():
        exchange(os.environ, ENV_COLLECTOR, ENV_PROGRAM)


def feed_own_backend() -> None:
    """Gives the program its variables back, once the SDK has read the collector's, and sends to its backend too."""
    if not exchange(os.environ, ENV_PROGRAM, ENV_COLLECTOR):
        return
    tracers, loggers = first_providers()
    if exporter := _exporter("TRACES"):
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        add_processor(tracers, _Spans(tracers, BatchSpanProcessor(exporter)))
    if exporter := _exporter("LOGS"):
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

        loggers.add_log_record_processor(_Records(loggers, BatchLogRecordProcessor(exporter)))


def _exporter(signal: str) -> Any:
    """The exporter that the SDK would make of the program's variables; None if they name no backend for this signal."""
    if not any(os.environ.get(f"OTEL_EXPORTER_OTLP_{part}ENDPOINT") for part in ("", f"{signal}_")):
        return None
    if "otlp" not in os.environ.get(f"OTEL_{signal}_EXPORTER", "").replace(" ", "").split(","):
        return None
    protocols = (os.environ.get(f"OTEL_EXPORTER_OTLP_{part}PROTOCOL") for part in (f"{signal}_", ""))
    name = "otlp_proto_http" if next(filter(None, protocols), "grpc") != "grpc" else "otlp_proto_grpc"
    (entry_point,) = entry_points(group=f"opentelemetry_{signal.lower()}_exporter", name=name)
    return entry_point.load()()


class _Spans(SpanProcessor):
    def __init__(self, provider: object, processor: SpanProcessor) -> None:
        self._provider, self._processor = provider, processor

    def on_end(self, span: ReadableSpan) -> None:
        if trace.get_tracer_provider() is self._provider:
            self._processor.on_end(span)

    def shutdown(self) -> None:
        """Called with the provider's shutdown."""
        self._processor.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._processor.force_flush(timeout_millis)


class _Records(LogRecordProcessor):
    def __init__(self, provider: object, processor: LogRecordProcessor) -> None:
        self._provider, self._processor = provider, processor

    def on_emit(self, log_record: Any) -> None:
        if get_logger_provider() is self._provider:
            hand_record(self._processor, log_record)

    emit = on_emit  # its name up to 1.34

    def shutdown(self) -> None:
        """Called with the provider's shutdown."""
        self._processor.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._processor.force_flush(timeout_millis)
