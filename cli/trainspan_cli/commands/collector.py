"""`trainspan collector`: receive OTLP, store it, serve readers, until stopped."""

from typing import Annotated

import typer

from trainspan_cli.settings import ConfigOption, settings
from trainspan_schemas.config import override
from trainspan_schemas.store import StoreAddress

__all__ = ["collector"]


def collector(
    store: Annotated[
        str | None, typer.Option(help="DuckDB file of the store [default: .trainspan/spans.duckdb].")
    ] = None,
    grpc: Annotated[str | None, typer.Option(help="OTLP/gRPC listener, HOST:PORT or off.")] = None,
    http: Annotated[str | None, typer.Option(help="OTLP/HTTP listener; only off.")] = None,
    flight: Annotated[str | None, typer.Option(help="Arrow Flight listener, HOST:PORT.")] = None,
    insecure_allow_remote: Annotated[
        bool | None,
        typer.Option("--insecure-allow-remote", help="Listen on addresses that other machines can reach."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Receive OTLP traces, logs and metrics, store them in DuckDB, and serve readers through Arrow Flight.

    An export is answered once it is on disk. Stops on Ctrl-C or SIGTERM after everything is loaded.

    Example: trainspan collector --store /data/spans.duckdb --grpc 127.0.0.1:4317
    """
    chosen = override(
        settings(config).collector,
        store=store,
        grpc=grpc,
        http=http,
        flight=flight,
        insecure_allow_remote=insecure_allow_remote,
    )
    from trainspan_collector.process import run

    run(chosen, _say_ready)


def _say_ready(address: StoreAddress) -> None:
    print(f"collecting into {address.store}: OTLP/gRPC {address.grpc or 'off'}, Flight {address.flight}", flush=True)
