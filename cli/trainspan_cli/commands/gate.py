"""`trainspan gate`."""

import importlib.util
import logging
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import (
    ConfigOption,
    Format,
    FormatOption,
    StoresOption,
    TargetArgument,
    run_settings,
    settings,
)
from trainspan_loop.addresses import stores_of
from trainspan_schemas.artifacts.gate_result import EXIT_CODES
from trainspan_schemas.command_events import event_line
from trainspan_schemas.errors import TrainspanError, UsageError, pip_install

if TYPE_CHECKING:
    from trainspan_cli.gate.gate_run import GateRun, GateSettings
    from trainspan_schemas.config.settings import Settings


@setting_options(
    "rollouts",
    *("tasks", "harness", "workspace", "stdin", "concurrency", "engine", "workers", "python", "timeout_s", "retries"),
    *("allow_no_calls", "judge", "judge_concurrency", "judge_timeout_s", "collector", "token_file"),
)
def gate(
    *,
    target: TargetArgument = None,
    baseline: Annotated[str, typer.Option(metavar="URL", help="Base URL of the policy in service (OpenAI API).")],
    candidate: Annotated[str, typer.Option(metavar="URL", help="Base URL of the policy that is to replace it.")],
    given: Given,
    n: Annotated[int, typer.Option(help="Rollouts of each task under each server.")] = 1,
    level: Annotated[
        float, typer.Option(help="Greatest probability of calling a candidate worse that is as good as the baseline.")
    ] = 0.05,
    check_judge: Annotated[
        str | None, typer.Option(metavar="JUDGE", help="Second judge: warns if the rewards rise above its verdicts.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for gate.md (Markdown) and gate.xml (JUnit).")
    ] = None,
    store: StoresOption = None,
    run: Annotated[str | None, typer.Option(help="Id of the gate [default: a new one].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume --run: finished rollouts are not repeated.")] = False,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> int:
    """Compare a candidate policy with the baseline on tasks, and stop as soon as it is worse beyond noise.

    Exit code 0: no decline found; 1: the candidate is worse; 2: no verdict, or wrong usage. All tasks of the file are used, whatever
    their split; their rollouts are never trained on.

    Example: trainspan gate --baseline http://old:8000/v1 --candidate http://new:8000/v1 --tasks val.jsonl agent.py:solve
    """
    if resume and run is None:
        raise UsageError("--resume continues a gate: name it with --run")
    if importlib.util.find_spec("numpy") is None:
        raise UsageError(f"gate needs numpy: {pip_install('processing')}")
    loaded = settings(config)
    run_id = run or uuid.uuid4().hex
    try:
        from trainspan_cli.gate.gate_run import GateSettings

        urls = (baseline, candidate)
        rollouts = run_settings(loaded, given, target or [], run_id, urls, n=n, resume=resume)
        wanted = GateSettings(rollouts, urls, level)
        return _run(wanted, loaded, stores_of(loaded, store), out, check_judge, as_json=format == "json")
    except KeyboardInterrupt:
        print(f"interrupted; to resume: the same command with --run {run_id} --resume", file=sys.stderr)
        raise
    except UsageError:
        raise
    except Exception as error:  # 1 says that the candidate is worse, so nothing else may end with it
        logging.getLogger(__name__).debug("gate failed", exc_info=True)
        named = "" if isinstance(error, TrainspanError | OSError) else f"{type(error).__name__}: "
        print(f"trainspan: no verdict: {named}{' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_CODES["no verdict"]


def _run(
    wanted: "GateSettings",
    loaded: "Settings",
    stores: tuple[str, ...],
    out: Path | None,
    check_judge: str | None,
    *,
    as_json: bool,
) -> int:
    """Runs the gate, prints the result and writes the pages."""
    from trainspan_cli.clients.ray_cluster import rollout_engine
    from trainspan_cli.gate.pages import print_result, write_pages
    from trainspan_cli.gate.tripwires import CheckJudge, tripwires
    from trainspan_cli.gate.verdict import gate_result

    check = CheckJudge(check_judge, wanted.rollouts.tasks) if check_judge else None
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out}: {error.strerror}") from None
    with rollout_engine(wanted.rollouts, loaded, [wanted.rollouts.tasks]):
        run = _rolled_out(wanted, as_json=as_json)
    result = gate_result(run, tripwires(run, stores, check))
    if as_json:
        print(event_line(result), flush=True)
    else:
        print_result(result)
    if out is not None:
        try:
            write_pages(result, out)
        except OSError as error:
            print(f"trainspan: the pages cannot be written: {error}", file=sys.stderr)
    return result.exit_code


def _rolled_out(wanted: "GateSettings", *, as_json: bool) -> "GateRun":
    from trainspan_cli.gate.gate_run import run_gate
    from trainspan_cli.views.rollout_progress import JsonProgress, ProgressBar

    if as_json:
        return run_gate(wanted, JsonProgress(every=False))
    with ProgressBar() as bar:
        return run_gate(wanted, bar)
