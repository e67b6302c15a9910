"""`trainspan compare`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainspan_cli.settings import Format, FormatOption
from trainspan_schemas.errors import UsageError


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs of the loop: their ids, names or folders.")],
    html: Annotated[Path | None, typer.Option(help="Also write a page with the curves.")] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare runs of the loop: held-out success or reward over seeds, grouped by the settings that differ.

    A name (`trainspan loop --name`) stands for all runs that have it, such as those of several seeds.

    Example: trainspan compare kl-0 kl-0.05

    Example: trainspan compare 20261120-101500-1a2b3c4d 20261120-113000-5e6f7a8b --html compare.html
    """
    from trainspan_loop.report.comparison import group_runs
    from trainspan_loop.report.comparison_report import comparison_record, comparison_text, write_comparison
    from trainspan_loop.state.run_folder import RunFolder, runs_named
    from trainspan_schemas.home import runs_dir

    folders: list[RunFolder] = []
    for name in runs:
        path = Path(name) if (Path(name) / "run.json").exists() else runs_dir() / name
        run_folders = [RunFolder(path)] if (path / "run.json").exists() else runs_named(name)
        if not run_folders:
            raise UsageError(f"no run {name} under {runs_dir()}; `trainspan status` lists them")
        folders += run_folders
    series = group_runs(list(dict.fromkeys(folders)))
    page = write_comparison(html, series) if html else None
    if format == "json":
        print(json.dumps(comparison_record(series)))
        return
    from rich.console import Console

    console = Console()
    console.print(comparison_text(series))
    if page:
        console.print(f"curves: {page}", markup=False, highlight=False, soft_wrap=True)
