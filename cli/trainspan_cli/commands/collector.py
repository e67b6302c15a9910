"""`trainspan collector`: receive OTLP, store it, serve readers, until stopped."""

from typing import Annotated

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, settings
from trainspan_schemas.config.load import override
from trainspan_schemas.store.access import StoreAddress

__all__ = ["collector"]


@setting_options(
    "collector", "store", "grpc", "http", "flight", "token_file", "tls_cert", "tls_key", "insecure_allow_remote"
)
def collector(
    *,
    given: Given,
    for_readers: Annotated[
        bool, typer.Option("--for-readers", hidden=True, help="Stop when no reader of the store is left.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Receive OTLP traces, logs and metrics, store them in DuckDB, and serve readers over Arrow Flight.

    An export is acknowledged once it is on disk. Ctrl-C or SIGTERM stops the collector after everything is loaded.

    Example: trainspan collector --store /data/spans.duckdb --grpc 127.0.0.1:4317
    """
    chosen = override(settings(config).collector, **given)
    from trainspan_collector.process import run

    run(chosen, _say_ready, for_readers=for_readers)


def _say_ready(address: StoreAddress) -> None:
    grpc, http = address.grpc or "off", address.http or "off"
    print(f"collecting into {address.store}: OTLP/gRPC {grpc}, OTLP/HTTP {http}, Flight {address.flight}", flush=True)
