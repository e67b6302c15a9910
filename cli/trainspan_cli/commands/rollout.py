"""`trainspan rollout`."""

import sys
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, TargetArgument, run_settings, settings
from trainspan_loop.addresses import stores_of
from trainspan_schemas.command_events import event_line
from trainspan_schemas.errors import UsageError

if TYPE_CHECKING:
    from trainspan_rollouts import RunSettings
    from trainspan_schemas.command_events import RunResult
    from trainspan_schemas.config.settings import Settings


@setting_options(
    "rollouts",
    *(
        "tasks",
        "harness",
        "workspace",
        "keep_workspaces",
        "stdin",
        "n",
        "concurrency",
        "engine",
        "workers",
        "python",
        "timeout_s",
        "retries",
        "allow_no_calls",
        "judge",
        "judge_concurrency",
        "judge_timeout_s",
    ),
    *("policy_url", "collector", "token_file"),
)
def rollout(
    *,
    target: TargetArgument = None,
    given: Given,
    limit: Annotated[int | None, typer.Option(help="Number of tasks, from the first [default: all].")] = None,
    split: Annotated[
        str | None, typer.Option(help="train or val: label of the rollouts; tasks of the other split are skipped.")
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="i/n", help="Run only part i (from 0) of n of the tasks, with all their rollouts.")
    ] = "0/1",
    round: Annotated[int, typer.Option(help="Round of the rollouts.")] = 0,
    run: Annotated[str | None, typer.Option(help="Run of the rollouts [default: a new one].")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume --run and --round: finished rollouts are not repeated.")
    ] = False,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> int:
    """Run an agent on tasks and judge the results.

    Example: trainspan rollout --tasks tasks.jsonl --n 8 --judge judges:exact my_agent.py:solve

    Example: trainspan rollout --tasks tasks.jsonl -- python agent.py --question {input}

    Example: trainspan rollout --tasks tasks.jsonl --harness codex --workspace template/ --judge judges:exact
    """
    if split not in (None, "train", "val"):
        raise UsageError(f"--split {split}: must be train or val")
    from trainspan_cli.clients.ray_cluster import rollout_engine
    from trainspan_cli.views.rollout_result import exit_code
    from trainspan_rollouts.records import Shard

    part = Shard.parse(shard)
    if part.count > 1 and run is None:
        raise UsageError(f"--shard {shard} is a part of a run: give all parts the same --run")
    if resume and run is None:
        raise UsageError("--resume continues a run: name it with --run (and --round)")
    loaded = settings(config)
    scope: dict[str, Any] = {"shard": part, "round": round, "split": split, "limit": limit, "resume": resume}
    wanted = run_settings(loaded, given, target or [], run or uuid.uuid4().hex, **scope)
    try:
        with rollout_engine(wanted, loaded, [wanted.tasks]):
            result = _run(wanted, loaded, as_json=format == "json")
    except KeyboardInterrupt:
        print(f"interrupted; to resume: the same command with --run {wanted.run_id} --resume", file=sys.stderr)
        raise
    return exit_code(result, is_part=wanted.shard.count > 1)


def _run(wanted: "RunSettings", loaded: "Settings", *, as_json: bool) -> "RunResult":
    """Runs the rollouts and prints progress and result."""
    from trainspan_cli.clients.run_calls import stored_calls
    from trainspan_cli.views.rollout_progress import JsonProgress, ProgressBar
    from trainspan_cli.views.rollout_result import print_table
    from trainspan_rollouts import run_rollouts
    from trainspan_rollouts.task_stream import STDIN

    if as_json:
        result = run_rollouts(wanted, JsonProgress(every=wanted.tasks == STDIN))
        print(event_line(result), flush=True)
        return result
    with ProgressBar() as bar:
        result = run_rollouts(wanted, bar)
    counted = 0 if result.resumed else result.calls
    print_table(result, stored_calls(stores_of(loaded), result.run_id, result.round, counted))
    return result
