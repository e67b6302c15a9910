"""`trainspan import`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, settings
from trainspan_loop.addresses import check_collector

if TYPE_CHECKING:
    from trainspan_importers.delivery import Delivery
    from trainspan_schemas.config.settings import RolloutsSettings, Settings


@setting_options("rollouts", "collector", "token_file")
def import_(
    *,
    source: Annotated[list[Path], typer.Argument(metavar="SOURCE...", help="Files, or folders of files.")],
    format: Annotated[
        str | None, typer.Option("--format", help="Format of the files (docs/import.md) [default: by their content].")
    ] = None,
    reward: Annotated[
        float | None,
        typer.Option(help="Give each rollout of these files this reward, as for files of nothing but good answers."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read everything, send nothing.")] = False,
    given: Given,
    config: ConfigOption = None,
) -> int:
    """Import traces from files of other tools: each trace becomes a rollout, with its calls, tools and scores.

    Example: trainspan import langfuse-export.jsonl --dry-run
    """
    import math

    from trainspan_cli.views.import_result import Lessons, print_import
    from trainspan_importers.importing import ImportRequest, import_files
    from trainspan_schemas.config.load import override
    from trainspan_schemas.errors import UsageError

    if reward is not None and not math.isfinite(reward):
        raise UsageError(f"--reward {reward}: a reward must be a finite number")
    request = ImportRequest(source, format, reward)
    lessons = Lessons()
    refused: dict[str, int] = {}
    with _progress(source) as on_bytes:
        if dry_run:
            imported = import_files(request, lambda _item: None, lessons.see, on_bytes)
        else:
            chosen = settings(config)
            sender = override(chosen.rollouts, **given)
            check_collector(chosen, sender.collector)
            delivery = _delivery(chosen, sender, refused)
            try:
                imported = import_files(request, delivery.send, lessons.see, on_bytes)
                delivery.flush()
            finally:
                delivery.close()
    print_import(imported, lessons, refused, was_sent=not dry_run)
    return 1 if imported.is_empty else 0


def _delivery(chosen: "Settings", sender: "RolloutsSettings", refused: dict[str, int]) -> "Delivery":
    from trainspan_importers.delivery import Delivery
    from trainspan_schemas.store.collectors import Collectors
    from trainspan_schemas.store.senders import sender_headers, token_advice

    store, token_file = chosen.collector.store, sender.token_file

    def headers(url: str) -> str | None:
        known = sender_headers("user", url, os.environ, token_file=token_file, store=store)
        return known or os.environ.get("OTEL_EXPORTER_OTLP_HEADERS")

    def advice(url: str) -> str:
        return token_advice("user", url, os.environ, token_file=token_file, store=store)

    def on_refused(reason: str, n_items: int) -> None:
        refused[reason] = refused.get(reason, 0) + n_items

    certificate = os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE")
    return Delivery(Collectors.of(sender.collector), headers, certificate, advice, on_refused)


@contextmanager
def _progress(sources: list[Path]) -> "Iterator[Callable[[int], None]]":
    """A bar on a terminal, by the bytes of the files."""
    if not sys.stderr.isatty():
        yield lambda _n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    total = sum(
        path.stat().st_size
        for source in sources
        for path in (source.rglob("*") if source.is_dir() else [source])
        if path.is_file()
    )
    columns = (TextColumn("import"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=4) as bar:
        task = bar.add_task("import", total=total)
        yield lambda n_bytes: bar.advance(task, n_bytes)
