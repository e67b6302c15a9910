"""The backend that a program's `OTEL_EXPORTER_OTLP_*` name, beside the collector.

A program that sets up OpenTelemetry itself reads these variables and sends there. Any other program relies on the command's
providers: these get exporters for the backend, which rest once the program sets a provider of its own.
"""

import os
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import trace
from opentelemetry._logs import get_logger_provider

from trainspan._guard import guarded
from trainspan._process.providers import first_providers
from trainspan._releases import Forwarding, hand_record
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

        spans = BatchSpanProcessor(exporter)

        def take_span(span: Any) -> None:
            if trace.get_tracer_provider() is tracers:
                spans.on_end(span)

        add_processor(tracers, Forwarding(take_span, spans.force_flush, spans.shutdown))
    if exporter := _exporter("LOGS"):
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

        records = BatchLogRecordProcessor(exporter)

        def take_record(record: Any) -> None:
            if get_logger_provider() is loggers:
                hand_record(records, record)

        loggers.add_log_record_processor(Forwarding(take_record, records.force_flush, records.shutdown))


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
