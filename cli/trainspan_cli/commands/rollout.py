"""`trainspan rollout`."""

import dataclasses
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, TargetArgument, settings
from trainspan_loop.addresses import check_collector, check_policy_server, stores_of
from trainspan_schemas.command_events import event_line
from trainspan_schemas.config.load import override
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

    loaded = settings(config)
    wanted = _run_settings(
        loaded, given, target or [], run, shard=shard, round=round, split=split, limit=limit, resume=resume
    )
    try:
        with rollout_engine(wanted, loaded, [wanted.tasks]):
            result = _run(wanted, loaded, as_json=format == "json")
    except KeyboardInterrupt:
        print(f"interrupted; to resume: the same command with --run {wanted.run_id} --resume", file=sys.stderr)
        raise
    return exit_code(result, is_part=wanted.shard.count > 1)


def _run_settings(
    loaded: "Settings", given: Given, target: list[str], run: str | None, shard: str, **scope: Any
) -> "RunSettings":
    """The settings of the run. Raises UsageError if there is no task file, or no run to resume or to share."""
    from trainspan_rollouts import RunSettings
    from trainspan_rollouts.records import Shard

    part = Shard.parse(shard)
    if part.count > 1 and run is None:
        raise UsageError(f"--shard {shard} is a part of a run: give all parts the same --run")
    chosen = override(loaded.rollouts, **given)
    if scope["resume"] and run is None:
        raise UsageError("--resume continues a run: name it with --run (and --round)")
    if chosen.tasks is None:
        raise UsageError("no task file: name one with --tasks or in [rollouts] tasks")
    check_collector(loaded, chosen.collector)
    check_policy_server(loaded, chosen.policy_url)
    settings_of_run = {**dataclasses.asdict(chosen), "tasks": Path(chosen.tasks)}
    return RunSettings(
        target=tuple(target),
        run_id=run or uuid.uuid4().hex,
        shard=part,
        store=loaded.collector.store,
        ray=loaded.ray,
        max_reward=loaded.dataset.max_reward,
        **scope,
        **settings_of_run,
    )


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
