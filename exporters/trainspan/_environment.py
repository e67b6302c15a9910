"""Defaults for programs under `opentelemetry-instrument`; importing this module sets them.

The command loads the entry-point group `opentelemetry_environment_variables` before it replaces itself by the program,
so the SDK sees them. What the user has set stays. Names here must not begin with `OTEL_`: the command would make
arguments of them.
"""

import os
from typing import Final

__all__ = ["DEFAULTS", "DISABLED", "is_disabled", "set_defaults"]

DISABLED: Final = "TRAINSPAN_DISABLED"

DEFAULTS: Final = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "2",  # seconds, also of the attempt at exit
    "OTEL_BSP_SCHEDULE_DELAY": "200",  # ms
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "64",
    "OTEL_BLRP_SCHEDULE_DELAY": "200",  # ms
    "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE": "64",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "10000",  # the SDK's 128 cut long conversations
}


def is_disabled() -> bool:
    """Whether the user turned all of trainspan off."""
    return os.environ.get(DISABLED, "").lower() in ("1", "true", "yes", "on")


def set_defaults() -> None:
    """Sets what is not set."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


if not is_disabled():
    set_defaults()
