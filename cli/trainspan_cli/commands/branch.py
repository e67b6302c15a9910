"""`trainspan branch`."""

import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, StoresOption, run_settings, settings
from trainspan_loop.addresses import stores_of
from trainspan_schemas.config.load import override
from trainspan_schemas.errors import UsageError

if TYPE_CHECKING:
    from trainspan_cli.branching.branch_run import BranchReport
    from trainspan_cli.branching.planning import BranchScope
    from trainspan_rollouts import RunSettings
    from trainspan_schemas.config.settings import Settings


@setting_options(
    "dataset",
    *("reward", "reward_name", "status_rewards", "air", "overlong", "overlong_penalty"),
    *("reward_concurrency", "reward_timeout_s"),
    place="rewarding",
)
@setting_options(
    "rollouts",
    *("tasks", "concurrency", "engine", "workers", "python", "timeout_s", "retries"),
    *("judge", "judge_concurrency", "judge_timeout_s"),
    *("policy_url", "collector", "token_file"),
)
def branch(
    *,
    target: Annotated[
        list[str] | None, typer.Argument(metavar="TARGET", help="The agent [default: as recorded for the rollouts].")
    ] = None,
    given: Given,
    rewarding: Given,
    rollout: Annotated[
        list[str] | None,
        typer.Option(help="Id of a rollout, or its beginning; may be repeated [default: the newest round]."),
    ] = None,
    of_run: Annotated[str | None, typer.Option(help="Rollouts of this run.")] = None,
    of_round: Annotated[int | None, typer.Option(help="And of this round [default: all rounds of the run].")] = None,
    filter: Annotated[
        str | None, typer.Option(help="module:function(StoredRollout) -> bool that selects rollouts [default: all].")
    ] = None,
    calls: Annotated[
        str,
        typer.Option(
            help="Calls to measure: all, random:P (each with probability P), agent:NAME, kind:NAME, or several with commas."
        ),
    ] = "all",
    n: Annotated[int, typer.Option(help="Branches from each state.")] = 4,
    limit: Annotated[int | None, typer.Option(help="Number of rollouts, chosen by a hash [default: all].")] = None,
    store: StoresOption = None,
    run: Annotated[str | None, typer.Option(help="Run of the branches [default: a new one].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume --run: finished branches are not repeated.")] = False,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> int:
    """Measure which calls of stored rollouts mattered: run the agent again from each state and compare the rewards.

    The agent is answered with the stored tokens up to the state, then samples freely. Value and advantage of each call are
    printed, and stored as evaluations on its span.

    Example: trainspan branch --calls random:0.25 --n 8

    Example: trainspan branch --rollout 0b8e4c7a --tasks tasks.jsonl --judge judges:exact my_agent.py:solve
    """
    from trainspan_cli.views.rollout_result import exit_code

    if resume and run is None:
        raise UsageError("--resume continues a run: name it with --run")
    if n < 1:
        raise UsageError(f"--n {n}: must be at least 1")
    loaded = _with_dataset(settings(config), {**rewarding, "filter": filter})
    scope = _scope(calls, rollout, of_run, of_round, limit)
    # The plan names tasks, target and judge.
    scope_of_run: dict[str, Any] = {"tasks": Path(), "n": n, "round": of_round or 0, "resume": resume}
    wanted = run_settings(loaded, given, (), run or uuid.uuid4().hex, **scope_of_run)
    try:
        report = _run(wanted, loaded, scope, target or [], given, store, as_json=format == "json")
    except KeyboardInterrupt:
        print(f"interrupted; to resume: the same command with --run {wanted.run_id} --resume", file=sys.stderr)
        raise
    return exit_code(report.run)


def _scope(
    calls: str, rollouts: list[str] | None, run: str | None, round_: int | None, limit: int | None
) -> "BranchScope":
    """What is measured. Raises UsageError."""
    from trainspan_cli.branching.planning import BranchScope
    from trainspan_processing.branches.choice import CallChoice

    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: must be at least 1")
    if rollouts and run is not None:
        raise UsageError("--rollout and --of-run: give one of them")
    if round_ is not None and run is None:
        raise UsageError(f"--of-round {round_}: name its run with --of-run")
    return BranchScope(CallChoice.parse(calls), tuple(rollouts) if rollouts else None, run, round_, limit)


def _with_dataset(loaded: "Settings", given: Given) -> "Settings":
    return dataclasses.replace(loaded, dataset=override(loaded.dataset, **given))


def _run(
    wanted: "RunSettings",
    loaded: "Settings",
    scope: "BranchScope",
    target: list[str],
    given: Given,
    stores: list[str] | None,
    *,
    as_json: bool,
) -> "BranchReport":
    """Plans, runs, measures, sends and prints."""
    from trainspan_cli.branching.branch_run import branch_rollouts
    from trainspan_cli.branching.planning import plan_branches
    from trainspan_cli.branching.report_table import print_branches, print_branches_json
    from trainspan_cli.clients.ray_cluster import rollout_engine
    from trainspan_cli.views.rollout_progress import JsonProgress, ProgressBar
    from trainspan_processing.read.source import Source
    from trainspan_processing.rewards.definition import reward_definition

    places = stores_of(loaded, stores)
    dataset, judge = loaded.dataset, given.get("judge")
    with Source(places) as source:
        plan = plan_branches(
            source,
            scope,
            dataset,
            wanted.run_id,
            target,
            given.get("tasks"),
            judge,
            resume=wanted.resume,
            now_ns=time.time_ns(),
        )
        with rollout_engine(wanted, loaded, plan.task_files):
            if as_json:
                report = branch_rollouts(source, plan, wanted, dataset, JsonProgress(every=False))
            else:
                with ProgressBar() as bar:
                    report = branch_rollouts(source, plan, wanted, dataset, bar)
    _send(report, wanted, reward_definition(dataset))
    (print_branches_json if as_json else print_branches)(report)
    return report


def _send(report: "BranchReport", wanted: "RunSettings", reward: Sequence[str]) -> None:
    """Sends the values of this reward to the collectors of their rollouts. Raises StoreError."""
    from trainspan_cli.branching.scores import scores_of
    from trainspan_cli.clients.feedback import send_scores
    from trainspan_schemas.store.collectors import Collectors
    from trainspan_schemas.store.senders import sender_headers, token_advice

    collectors, certificate = Collectors.of(wanted.collector), os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE")
    scores = list(scores_of(report.rollouts, report.run.run_id, reward))
    for url in collectors.urls:
        of_collector = [score for score in scores if collectors.url_for(score.rollout_id or "") == url]
        headers = sender_headers("runner", url, os.environ, token_file=wanted.token_file, store=wanted.store)
        advice = token_advice("runner", url, os.environ, token_file=wanted.token_file, store=wanted.store)
        if of_collector:
            given = headers or os.environ.get("OTEL_EXPORTER_OTLP_HEADERS")
            send_scores(of_collector, url, given, certificate, token_advice=advice)
