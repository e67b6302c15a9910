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
    http: Annotated[str | None, typer.Option(help="OTLP/HTTP listener, HOST:PORT or off.")] = None,
    flight: Annotated[str | None, typer.Option(help="Arrow Flight listener, HOST:PORT.")] = None,
    token_file: Annotated[str | None, typer.Option(help='Tokens by role: lines of role = "token".')] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM certificate of all listeners.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its PEM key.")] = None,
    insecure_allow_remote: Annotated[
        bool | None,
        typer.Option(
            "--insecure-allow-remote", help="Listen where other machines can reach it, without tokens and TLS."
        ),
    ] = None,
    for_readers: Annotated[
        bool, typer.Option("--for-readers", hidden=True, help="End when no reader of the store is left.")
    ] = False,
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
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure_allow_remote=insecure_allow_remote,
    )
    from trainspan_collector.process import run

    run(chosen, _say_ready, for_readers=for_readers)


def _say_ready(address: StoreAddress) -> None:
    grpc, http = address.grpc or "off", address.http or "off"
    print(f"collecting into {address.store}: OTLP/gRPC {grpc}, OTLP/HTTP {http}, Flight {address.flight}", flush=True)
