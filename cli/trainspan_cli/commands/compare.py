"""`trainspan compare`."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from trainspan_cli.settings import ConfigOption, Format, FormatOption, StoresOption, settings
from trainspan_loop.addresses import stores_of
from trainspan_schemas.errors import UsageError, pip_install


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs of the loop, or of `trainspan rollout`: ids, names or folders."),
    ],
    reference: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Compare with the held-out rollouts of this run, such as a vendor's model."),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN=IN/OUT", help="With --reference: prices of a million prompt and completion tokens of a run."
        ),
    ] = None,
    store: StoresOption = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with the curves.")] = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare runs of the loop: held-out success or reward over seeds, grouped by the settings that differ.

    A name (`trainspan loop --name`) stands for all runs that have it, such as those of several seeds.

    With --reference, runs of the loop or of `trainspan rollout --run RUN --split val` are compared with another run on the same
    held-out tasks: the share of its success that they reach, tokens and cost per success.

    Example: trainspan compare kl-0 kl-0.05

    Example: trainspan compare own --reference vendor --price vendor=2.5/10 --price own=0.1/0.4
    """
    if reference is not None:
        if html is not None:
            raise UsageError("--html draws curves of the loop's runs, of which --reference has none")
        return _with_reference(
            runs, reference, price or [], stores_of(settings(config), store), as_json=format == "json"
        )
    if price or store:
        raise UsageError("--price and --store belong to --reference")
    return _of_the_loop(runs, html, as_json=format == "json")


def _with_reference(
    runs: list[str], reference: str, given: list[str], stores: tuple[str, ...], *, as_json: bool
) -> None:
    from trainspan_loop.report.reference import Price, compare_with_reference, held_out_runs
    from trainspan_loop.report.reference_report import reference_record, reference_text
    from trainspan_loop.state.run_folder import runs_named

    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f"--reference reads the store and needs pyarrow: {pip_install('processing')}")
    run_ids = {name: [folder.run_id for folder in runs_named(name)] or [name] for name in (reference, *runs)}
    if len(run_ids[reference]) > 1:
        raise UsageError(f"--reference {reference} is a name of {len(run_ids[reference])} runs: give the id of one")
    prices: dict[str, Price] = {}
    for text in given:
        name, _, amounts = text.rpartition("=")
        if name not in run_ids:
            raise UsageError(
                f"--price {text}: no run {name!r} is compared; write RUN=IN/OUT, such as {reference}=2.5/10"
            )
        prices |= dict.fromkeys(run_ids[name], Price.parse(amounts))
    wanted = dict.fromkeys(run_id for name in runs for run_id in run_ids[name] if name != reference)
    standard, *others = held_out_runs(stores, [*run_ids[reference], *wanted])
    compared = compare_with_reference(standard, others, prices)
    if as_json:
        print(json.dumps(reference_record(compared)))
        return
    from rich.console import Console

    Console().print(reference_text(compared, standard.judge))


def _of_the_loop(runs: list[str], html: Path | None, *, as_json: bool) -> None:
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
    if as_json:
        print(json.dumps(comparison_record(series)))
        return
    from rich.console import Console

    console = Console()
    console.print(comparison_text(series))
    if page:
        console.print(f"curves: {page}", markup=False, highlight=False, soft_wrap=True)
