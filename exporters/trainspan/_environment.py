"""Defaults for programs under `opentelemetry-instrument`; importing this module sets them, so nothing of ours imports it.

The command loads the entry-point group `opentelemetry_environment_variables` before it replaces itself by the program,
so the SDK sees them. What the user has set stays, and all of it reaches child processes: each value here means the same
to OpenTelemetry in every language. Names here must not begin with `OTEL_`: the command would make arguments of them.
"""

import os
from typing import Final

from trainspan._switch import is_disabled

__all__ = ["DEFAULTS"]

DEFAULTS: Final = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317",
    "OTEL_BSP_SCHEDULE_DELAY": "200",  # ms
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "64",
    "OTEL_BLRP_SCHEDULE_DELAY": "200",  # ms
    "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE": "64",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "10000",  # the SDK's 128 cut long conversations
}

if not is_disabled():
    for _name, _value in DEFAULTS.items():
        os.environ.setdefault(_name, _value)
