"""`trainspan dataset`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainspan_cli.settings import ConfigOption, FormatOption, settings


def dataset(
    store: Annotated[list[str] | None, typer.Option(help="Store path or grpc:// address; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of datasets.")] = None,
    run: Annotated[str | None, typer.Option(help="Only rollouts of this run.")] = None,
    round: Annotated[int | None, typer.Option(help="Only rollouts of this round; also the dataset's number.")] = None,
    credit: Annotated[
        str | None, typer.Option(help="identical, return_to_go, step, gigpo, per_agent, or module:function.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="grpo, dr_grpo, rloo, batch, global, running, rae, none, or module:function."),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="module:function or file.py:function that re-rewards each stored rollout.")
    ] = None,
    reward_concurrency: Annotated[int | None, typer.Option(help="Calls of --reward under way at once.")] = None,
    reward_timeout_s: Annotated[float | None, typer.Option(help="Seconds for one call of --reward.")] = None,
    reward_name: Annotated[
        str | None, typer.Option(help="Evaluation that is the reward; several as correct=1,style=0.2,tools?=0.1.")
    ] = None,
    status_rewards: Annotated[
        str | None, typer.Option(help="Rewards of rollouts that failed: timeout=0,agent_error=-1.")
    ] = None,
    combine: Annotated[
        str | None, typer.Option(help="Several rewards: sum, or gdpo (compare each, then add up).")
    ] = None,
    air: Annotated[
        str | None,
        typer.Option(help="Step rewards from the trace: tool_error=-0.1,parse_error=-0.1,repeated_call=-0.05."),
    ] = None,
    overlong: Annotated[str | None, typer.Option(help="Calls that end by length: keep, mask or punish.")] = None,
    overlong_penalty: Annotated[float | None, typer.Option(help="What punish takes from such a call's reward.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Discount per call for return_to_go and gigpo.")] = None,
    group_over: Annotated[str | None, typer.Option(help="Statistics over rollouts or calls.")] = None,
    step_by: Annotated[str | None, typer.Option(help="step compares calls of the same turn or agent.")] = None,
    agent_credit: Annotated[
        str | None, typer.Option(help="For per_agent: planner=rloo,coder=return_to_go+grpo,*=rae.")
    ] = None,
    agents: Annotated[str | None, typer.Option(help="Train only these agents' calls.")] = None,
    policies: Annotated[str | None, typer.Option(help="Train only these policies' calls.")] = None,
    choices: Annotated[
        str | None, typer.Option(help="Of several answers to one request: train those that were used, or all.")
    ] = None,
    filter: Annotated[
        str | None, typer.Option(help="module:function(StoredRollout) -> bool: which rollouts are trained.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="recorded, all, or the share of tasks to train on.")] = None,
    admit: Annotated[
        str | None,
        typer.Option(
            help="Do not leave calls out for these: unsigned, unstated_sampling, untrusted, untrusted_reward."
        ),
    ] = None,
    wait_s: Annotated[float | None, typer.Option(help="Wait so long for rollouts that are still arriving.")] = None,
    settle_s: Annotated[float | None, typer.Option(help="Silence after which a rollout counts as unfinished.")] = None,
    group_wait_s: Annotated[
        float | None, typer.Option(help="How long a task's group waits for rollouts that its runner still makes.")
    ] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Drop calls that are more versions old.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Drop calls with more tokens.")] = None,
    min_coverage: Annotated[float | None, typer.Option(help="Least share of trainable calls.")] = None,
    keep_zero_spread: Annotated[
        bool | None, typer.Option("--keep-zero-spread", help="Keep groups without spread, advantage 0.")
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(help="Make this dataset again under --out, from its manifest alone, and compare the bytes."),
    ] = None,
    allow_behind: Annotated[
        bool, typer.Option("--allow-behind", help="Build although the store still loads what it acknowledged.")
    ] = False,
    show_merge_failures: Annotated[
        bool,
        typer.Option(
            "--show-merge-failures", help="Show for each cause the tokens at which a call departs from the one before."
        ),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model whose tokenizer decodes these tokens [default: the one served].")
    ] = None,
    config: ConfigOption = None,
    format: FormatOption = "table",
) -> None:
    """Build the next dataset from all complete rollouts that no earlier dataset used.

    Example: trainspan dataset --wait-s 30 --baseline rloo
    """
    import time

    from trainspan_cli.quality import print_merge_failures, print_quality
    from trainspan_processing.build import Request, build_dataset
    from trainspan_processing.quality.page import QUALITY_PAGE
    from trainspan_processing.replay import rebuild
    from trainspan_processing.survey import Clock
    from trainspan_schemas.config import override
    from trainspan_schemas.dataset import about_dir
    from trainspan_schemas.errors import DatasetError, NothingToTrainError
    from trainspan_schemas.home import datasets_dir, store_path

    chosen = settings(config)
    section = override(
        chosen.dataset,
        credit=credit,
        baseline=baseline,
        reward=reward,
        reward_concurrency=reward_concurrency,
        reward_timeout_s=reward_timeout_s,
        reward_name=reward_name,
        status_rewards=status_rewards,
        combine=combine,
        air=air,
        overlong=overlong,
        overlong_penalty=overlong_penalty,
        gamma=gamma,
        group_over=group_over,
        step_by=step_by,
        agent_credit=agent_credit,
        agents=agents,
        policies=policies,
        choices=choices,
        filter=filter,
        split=split,
        admit=admit,
        wait_s=wait_s,
        settle_s=settle_s,
        group_wait_s=group_wait_s,
        max_staleness=max_staleness,
        max_tokens=max_tokens,
        min_coverage=min_coverage,
        keep_zero_spread=keep_zero_spread,
    )
    request = Request(
        stores=tuple(store or [str(store_path(chosen.collector.store))]),
        out=out or datasets_dir(section.out),
        settings=section,
        run_id=run,
        round=round,
        allow_behind=allow_behind,
    )
    clock = Clock(time.time_ns, time.sleep)
    if again is not None:
        rebuilt = rebuild(again, request.out, store, clock)
        if rebuilt.differences:
            raise DatasetError(
                f"{again} came out differently at {rebuilt.built.path}: {'; '.join(rebuilt.differences)}"
            )
        built = rebuilt.built
    else:
        try:
            built = build_dataset(request, clock)
        except NothingToTrainError as error:
            if format == "json":
                print(json.dumps({"nothing_to_train": str(error), **error.figures}))
            raise
    if format == "json":
        print(json.dumps({"path": str(built.path), "sha256": built.sha256, **built.manifest}))
    else:
        report = about_dir(built.path) / QUALITY_PAGE
        print_quality(built.manifest, built.path, was_there=built.was_there, page=report if report.exists() else None)
        if show_merge_failures:
            from trainspan_cli.tokenizers import tokenizer_places
            from trainspan_processing.decoding import find_decoder

            decoder = find_decoder(tokenizer_places(model, chosen))
            print_merge_failures(built.manifest["merge_failures"], built.path, decoder)
