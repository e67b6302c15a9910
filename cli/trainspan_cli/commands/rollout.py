"""`trainspan rollout`."""

import dataclasses
import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from trainspan_cli.settings import ConfigOption, FormatOption, settings
from trainspan_schemas.config import override
from trainspan_schemas.errors import UsageError
from trainspan_schemas.home import store_path
from trainspan_schemas.identity import Split

if TYPE_CHECKING:
    from trainspan_rollouts import Progress, RunResult

_PROGRESS_INTERVAL_S = 0.5


def rollout(
    target: Annotated[
        list[str], typer.Argument(metavar="TARGET", help="module:function, path/file.py:function, or -- COMMAND ARGS.")
    ],
    tasks: Annotated[str | None, typer.Option(help="Task file: JSON lines, CSV or Parquet.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Rollouts per task.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many tasks [default: all].")] = None,
    split: Annotated[
        str | None, typer.Option(help="train or val: label, and choice of the tasks that name one.")
    ] = None,
    round: Annotated[int, typer.Option(help="Round that the rollouts belong to.")] = 0,
    run: Annotated[str | None, typer.Option(help="Run that they belong to [default: a new one].")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Rollouts under way at once.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes for a function.")] = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout-s", help="Seconds for one rollout.")] = None,
    retries: Annotated[int | None, typer.Option(help="Further attempts after an infrastructure failure.")] = None,
    judge: Annotated[str | None, typer.Option(help="module:function that gives the reward.")] = None,
    judge_concurrency: Annotated[int | None, typer.Option(help="Verdicts under way at once.")] = None,
    judge_timeout_s: Annotated[float | None, typer.Option("--judge-timeout-s", help="Seconds for one verdict.")] = None,
    policy_url: Annotated[str | None, typer.Option(help="Base URL of the policy.")] = None,
    collector: Annotated[str | None, typer.Option(help="OTLP/gRPC endpoint.")] = None,
    token_file: Annotated[str | None, typer.Option(help="The collector's role tokens.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --run and --round: finished rollouts are not repeated.")
    ] = False,
    config: ConfigOption = None,
    format: FormatOption = "table",
) -> int:
    """Run an agent on tasks and judge the results.

    Example: trainspan rollout --tasks tasks.jsonl --n 8 --judge judges:exact my_agent.py:solve

    Example: trainspan rollout --tasks tasks.jsonl -- python agent.py --question {input}
    """
    from trainspan_cli.run_calls import stored_calls
    from trainspan_rollouts import RunSettings, run_rollouts

    if format not in ("table", "json"):
        raise UsageError(f"--format {format}: it is table or json")
    if split not in (None, "train", "val"):
        raise UsageError(f"--split {split}: it is train or val")
    loaded = settings(config)
    chosen = override(
        loaded.rollouts,
        tasks=tasks,
        n=n,
        concurrency=concurrency,
        workers=workers,
        timeout_s=timeout_s,
        retries=retries,
        judge=judge,
        judge_concurrency=judge_concurrency,
        judge_timeout_s=judge_timeout_s,
        policy_url=policy_url,
        collector=collector,
        token_file=token_file,
    )
    if resume and run is None:
        raise UsageError("--resume goes on with a run: name it with --run (and --round)")
    if chosen.tasks is None:
        raise UsageError("no task file: name one with --tasks or in [rollouts] tasks")
    wanted = {**dataclasses.asdict(chosen), "tasks": Path(chosen.tasks)}
    run_settings = RunSettings(
        target=tuple(target),
        run_id=run or uuid.uuid4().hex,
        round=round,
        split=cast("Split | None", split),
        limit=limit,
        resume=resume,
        store=loaded.collector.store,
        **wanted,
    )
    os.environ.setdefault("OPENAI_API_KEY", "trainspan")  # a judge may stand in a module that makes a client
    try:
        if format == "json":
            result = run_rollouts(run_settings, _JsonProgress())
            print(json.dumps({"event": "result", **dataclasses.asdict(result)}), flush=True)
        else:
            with _Bar() as bar:
                result = run_rollouts(run_settings, bar)
            stored = stored_calls(
                store_path(loaded.collector.store), result.run_id, result.round, 0 if result.resumed else result.calls
            )
            _print_table(result, stored)
    except KeyboardInterrupt:
        print(f"interrupted; to go on: the same with --run {run_settings.run_id} --resume", file=sys.stderr)
        raise
    return 0 if result.status.get("ok") and not result.unacknowledged else 1


class _JsonProgress:
    """One line at most twice a second."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, progress: "Progress") -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or progress.done == progress.total:
            self._next_s = now_s + _PROGRESS_INTERVAL_S
            print(json.dumps({"event": "progress", **dataclasses.asdict(progress)}), flush=True)


class _Bar:
    """A progress bar on stderr with done, failed and mean reward."""

    def __enter__(self) -> "_Bar":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("rollouts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("rollouts", total=None, note="")
        return self

    def __call__(self, progress: "Progress") -> None:
        if not self._progress.live.is_started:  # a target that cannot be used is told without a bar
            self._progress.start()
        reward = "no reward yet" if progress.mean_reward is None else f"mean reward {progress.mean_reward:.3f}"
        self._progress.update(
            self._task, completed=progress.done, total=progress.total, note=f"{progress.failed} failed, {reward}"
        )

    def __exit__(self, *_: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()


def _print_table(result: "RunResult", stored: int | None) -> None:
    """`stored`: the calls of the round that the policy server recorded, None where that is unknown."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    reward = "none" if result.mean_reward is None else f"{result.mean_reward:.3f} over {result.rewarded} rollouts"
    rows = {
        "run": result.run_id,
        "round": str(result.round),
        "rollouts": ", ".join(f"{count} {status}" for status, count in result.status.items()),
        "mean reward": reward,
        "model calls": _calls(result.calls, stored),
        "seconds": f"{result.seconds:.1f}",
    }
    if result.unacknowledged:
        rows["not acknowledged"] = f"{result.unacknowledged} verdicts; --run {result.run_id} --resume sends them"
    if result.resumed:
        rows["finished before"] = str(result.resumed)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _calls(counted: int, stored: int | None) -> str:
    if stored is None:
        return f"{counted}, as far as the agents' processes could tell"
    if stored == counted:
        return str(stored)
    return f"{stored} recorded by the policy server, {counted} counted by the agents' processes"
