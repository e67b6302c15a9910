"""Defaults for programs under `opentelemetry-instrument`, set when this module is imported; our own code never does.

The command loads the entry-point group `opentelemetry_environment_variables` before it replaces itself with the
program, so the SDK sees them. The user's own values take precedence, and child processes inherit all of them: each
value here means the same to OpenTelemetry in every language. Names in this module must not begin with `OTEL_`: the
command would turn them into arguments.

A program that is started by hand sends to this user's running collector, at whatever port that listens. An endpoint that it has
for a backend of its own is set aside until our exporters are set up. It gets the token of the role `user` if this user's
collector listens at its endpoint, so that its rewards are recognized as the user's. A runner's agent has its own endpoint and
headers, and gets nothing here.
"""

import os
from typing import Final

from trainspan._guard import guarded
from trainspan._switch import is_disabled
from trainspan_schemas.store.otlp_variables import (
    ENDPOINT,
    ENV_COLLECTOR,
    ENV_PROGRAM,
    exchange,
    own_variables,
    set_aside,
)

__all__ = ["DEFAULTS"]

DEFAULTS: Final = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317",
    "OTEL_BSP_SCHEDULE_DELAY": "200",  # ms
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "64",
    "OTEL_BSP_MAX_QUEUE_SIZE": "8192",  # a program that ends thousands of spans at once overflows the SDK's 2048
    "OTEL_BLRP_SCHEDULE_DELAY": "200",  # ms
    "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE": "64",
    "OTEL_BLRP_MAX_QUEUE_SIZE": "8192",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "10000",  # the SDK's 128 cut long conversations
}

_HEADERS: Final = "OTEL_EXPORTER_OTLP_HEADERS"
_OF_SIGNALS: Final = tuple(
    f"OTEL_EXPORTER_OTLP_{signal}_{kind}"
    for signal in ("TRACES", "LOGS", "METRICS")
    for kind in ("ENDPOINT", "HEADERS")
)


@guarded
def _find_collector() -> None:
    if ENV_PROGRAM in os.environ or exchange(os.environ, ENV_COLLECTOR, ENV_PROGRAM):
        return  # started by a runner, or by an agent
    from trainspan_schemas.home import store_path
    from trainspan_schemas.store.access import running_collector
    from trainspan_schemas.web_origins import dialed_host

    running = running_collector(store_path(os.environ.get("TRAINSPAN_COLLECTOR__STORE")))
    if running is not None and running.grpc and not running.tls:
        set_aside(os.environ, own_variables(os.environ, filter(None, (running.grpc, running.http))))
        host, _, port = running.grpc.rpartition(":")
        os.environ.setdefault(ENDPOINT, f"http://{dialed_host(host)}:{port}")


@guarded
def _show_whose_program_it_is() -> None:
    if _HEADERS in os.environ or any(name in os.environ for name in _OF_SIGNALS):
        return
    from trainspan_schemas.store.collectors import ENV_COLLECTORS
    from trainspan_schemas.store.endpoint import is_this_machine
    from trainspan_schemas.store.senders import known_headers

    if not all(is_this_machine(url) for url in os.environ.get(ENV_COLLECTORS, "").split(",") if url):
        return  # the exporters of all collectors send the same headers
    store = os.environ.get("TRAINSPAN_COLLECTOR__STORE")
    if headers := known_headers("user", os.environ[ENDPOINT], store=store):
        os.environ[_HEADERS] = headers


if not is_disabled():
    _find_collector()
    for _name, _value in DEFAULTS.items():
        os.environ.setdefault(_name, _value)
    _show_whose_program_it_is()
