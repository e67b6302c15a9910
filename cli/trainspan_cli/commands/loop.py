"""`trainspan loop`."""

import dataclasses
import json
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, settings
from trainspan_schemas.errors import ConfigError, UsageError
from trainspan_schemas.home import is_url

if TYPE_CHECKING:
    from pathlib import Path

    from trainspan_loop.state.run_folder import RunFolder
    from trainspan_loop.state.task_pool import LoopTasks
    from trainspan_schemas.config.settings import Settings

_ENDING_S = 30.0


@setting_options("loop", "rounds", "overlap")
def loop(
    *,
    given: Given,
    seeds: Annotated[int, typer.Option(help="Number of seeds: one run for each, in sequence, then a comparison.")] = 1,
    name: Annotated[
        str | None, typer.Option(help="Name of the run, or of all its seeds, for `trainspan compare`.")
    ] = None,
    config: ConfigOption = None,
    resume: Annotated[
        bool, typer.Option(help="Resume the newest unfinished run (of this name) with the same settings.")
    ] = False,
    finish: Annotated[
        bool, typer.Option(help="Resume it, begin no further round, and end it as after its last one.")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> int:
    """Run rollouts, dataset and training for many rounds, and supervise the collector and the policy server.

    Example: trainspan loop --rounds 20 --config trainspan.toml

    Example: trainspan loop --seeds 3 --name kl-0.05 --set train.kl_coef=0.05
    """
    import dataclasses

    from trainspan_loop.addresses import check_ports
    from trainspan_loop.state.run_folder import RunFolder, newest_unfinished
    from trainspan_loop.state.series import SeedSeries, continued
    from trainspan_schemas.artifacts.run_records import evaluations_in

    if seeds < 1:
        raise UsageError(f"--seeds {seeds}: at least 1")
    chosen, tasks = _checked(config, given)
    # Processes of a loop that was killed may need a while to end.
    check_ports(chosen, wait_s=_ENDING_S if resume or finish else 0.0)
    if seeds == 1:
        values = dataclasses.asdict(chosen)
        unfinished = newest_unfinished(values, name) if resume or finish else None
        if finish and unfinished is None:
            raise UsageError("--finish: the newest run is finished, or has other settings; `trainspan status` shows it")
        folder = unfinished or RunFolder.create(values, name)
        return _show(_run(continued(chosen, folder, finish=finish), tasks, config, folder, format), format)
    series = SeedSeries.open(chosen, seeds, name, resume=resume or finish)
    integrity = True
    for seeded, folder in series.unfinished(begun_only=finish):
        summary = _run(continued(seeded, folder, finish=finish), tasks, config, folder, format)
        integrity = integrity and summary.integrity
        _show(summary, format)
    series.finish()
    from trainspan_cli.commands.compare import compare

    runs = series.runs()
    if any(record["n"] for run in runs for record in evaluations_in(run.records(), "validation")):
        compare([run.run_id for run in runs], html=series.path.with_suffix(".html"), format=format)
    return 0 if integrity else 1


def _checked(config: "Path | None", given: Given) -> "tuple[Settings, LoopTasks]":
    """The settings with the given options, and the tasks. Raises ConfigError, TaskFileError if no run can have them."""
    from trainspan_loop.sampling.choice import check_numbers, check_sampling
    from trainspan_loop.state.task_pool import LoopTasks
    from trainspan_loop.trials.trials import check_trials
    from trainspan_schemas.config.load import override

    chosen = settings(config)
    chosen = dataclasses.replace(chosen, loop=override(chosen.loop, **given))
    if chosen.dataset.out and is_url(chosen.dataset.out):
        raise ConfigError("dataset.out is a URL, and the datasets of a loop are in its run folder: remove the setting")
    check_numbers(chosen)
    check_sampling(chosen)
    tasks = LoopTasks.open(chosen)
    check_trials(chosen, tasks.trial)
    return chosen, tasks


@dataclasses.dataclass(frozen=True, slots=True)
class LoopSummary:
    """What `trainspan loop` prints of a run under `--format json`."""

    run_id: str
    folder: str
    report: str
    """The path of its page."""
    skipped_rounds: int
    refused_rounds: int
    integrity: bool
    """Whether every check of every record holds."""


def _run(
    settings: "Settings", tasks: "LoopTasks", config: "Path | None", folder: "RunFolder", format: str
) -> LoopSummary:
    from rich.console import Console

    from trainspan_loop.checks.integrity import all_hold
    from trainspan_loop.checks.skipping import skipped_rounds
    from trainspan_loop.processes.screen import Screen
    from trainspan_loop.report.run_report import write_report
    from trainspan_loop.rounds import Loop
    from trainspan_loop.trials.verdict import refused_rounds
    from trainspan_schemas.artifacts.run_records import rounds_in

    # The import of Polars, above, makes Ctrl-C restart waits for threads instead of ending them.
    signal.siginterrupt(signal.SIGINT, True)
    console = Console(stderr=format == "json")
    try:
        with folder.held(), Screen(console, f"trainspan run {folder.run_id}") as screen:
            folder.begin_run(settings.loop.rounds)
            Loop(settings, tasks, config, folder, screen).run()
    except KeyboardInterrupt:
        done = len(rounds_in(folder.records()))
        print(
            f"trainspan: interrupted after {done} rounds of run {folder.run_id}; the same command with --resume continues it",
            file=sys.stderr,
        )
        sys.exit(130)
    records = folder.records()
    page = write_report(folder, f"trainspan run {folder.run_id}", [])
    return LoopSummary(
        folder.run_id,
        str(folder.path),
        str(page),
        len(skipped_rounds(records)),
        len(refused_rounds(records)),
        all_hold([check for record in records for check in record["checks"]]),
    )


def _show(summary: LoopSummary, format: str) -> int:
    print(json.dumps(dataclasses.asdict(summary)) if format == "json" else f"report: {summary.report}")
    return 0 if summary.integrity else 1
