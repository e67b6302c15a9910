"""`trainspan dataset`."""

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

from trainspan_cli import dataset_options as options
from trainspan_cli.settings import ConfigOption, FormatOption, settings
from trainspan_schemas.config import override
from trainspan_schemas.settings import DatasetSettings, Settings

if TYPE_CHECKING:
    from trainspan_processing.assembly.build import BuiltDataset, Request


def dataset(
    context: typer.Context,
    store: options.Store = None,
    out: options.Out = None,
    run: options.Run = None,
    round: options.Round = None,
    credit: options.Credit = None,
    baseline: options.Baseline = None,
    reward: options.Reward = None,
    reward_concurrency: options.RewardConcurrency = None,
    reward_timeout_s: options.RewardTimeoutS = None,
    reward_name: options.RewardName = None,
    status_rewards: options.StatusRewards = None,
    combine: options.Combine = None,
    air: options.Air = None,
    overlong: options.Overlong = None,
    overlong_penalty: options.OverlongPenalty = None,
    gamma: options.Gamma = None,
    group_over: options.GroupOver = None,
    step_by: options.StepBy = None,
    agent_credit: options.AgentCredit = None,
    agents: options.Agents = None,
    policies: options.Policies = None,
    choices: options.Choices = None,
    filter: options.Filter = None,
    split: options.Split = None,
    admit: options.Admit = None,
    wait_s: options.WaitS = None,
    settle_s: options.SettleS = None,
    group_wait_s: options.GroupWaitS = None,
    max_staleness: options.MaxStaleness = None,
    max_tokens: options.MaxTokens = None,
    min_coverage: options.MinCoverage = None,
    keep_zero_spread: options.KeepZeroSpread = None,
    again: options.Again = None,
    allow_behind: options.AllowBehind = False,
    show_merge_failures: options.ShowMergeFailures = False,
    model: options.Model = None,
    config: ConfigOption = None,
    format: FormatOption = "table",
) -> None:
    """Build the next dataset from all complete rollouts that no earlier dataset used.

    Example: trainspan dataset --wait-s 30 --baseline rloo
    """
    chosen, given = settings(config), context.params
    request = _request(chosen, given)
    built = _rebuilt(request, given) if again is not None else _built(request, as_json=format == "json")
    if format == "json":
        print(json.dumps({"path": str(built.path), "sha256": built.sha256, **built.manifest}))
        return
    _print(built)
    if show_merge_failures:
        _print_merge_failures(built, chosen, model)


def _request(chosen: Settings, given: dict[str, Any]) -> "Request":
    """What to build: the settings with the flags that were given."""
    from trainspan_processing.assembly.build import Request
    from trainspan_schemas.home import datasets_dir, store_path

    names = {field.name for field in fields(DatasetSettings)} - {"out"}
    section = override(chosen.dataset, **{name: value for name, value in given.items() if name in names})
    return Request(
        stores=tuple(given["store"] or [str(store_path(chosen.collector.store))]),
        out=given["out"] or datasets_dir(section.out),
        settings=section,
        run_id=given["run"],
        round=given["round"],
        allow_behind=given["allow_behind"],
    )


def _built(request: "Request", *, as_json: bool) -> "BuiltDataset":
    """The next dataset. A program that reads JSON learns why there is none."""
    import time

    from trainspan_processing.assembly.build import build_dataset
    from trainspan_processing.traces.trace_index import Clock
    from trainspan_schemas.errors import NothingToTrainError

    try:
        return build_dataset(request, Clock(time.time_ns, time.sleep))
    except NothingToTrainError as error:
        if as_json:
            print(json.dumps({"nothing_to_train": str(error), **error.figures}))
        raise


def _rebuilt(request: "Request", given: dict[str, Any]) -> "BuiltDataset":
    """The dataset `--again`, made again. Raises DatasetError if a byte differs."""
    import time

    from trainspan_processing.assembly.rebuild import rebuild
    from trainspan_processing.traces.trace_index import Clock
    from trainspan_schemas.errors import DatasetError

    original = given["again"]
    rebuilt = rebuild(original, request.out, given["store"], Clock(time.time_ns, time.sleep))
    if rebuilt.differences:
        told = "; ".join(rebuilt.differences)
        raise DatasetError(f"{original} came out differently at {rebuilt.built.path}: {told}")
    return rebuilt.built


def _print(built: "BuiltDataset") -> None:
    from trainspan_cli.views.dataset_quality import print_quality
    from trainspan_processing.report.quality_page import QUALITY_PAGE
    from trainspan_schemas.dataset import about_dir

    report = about_dir(built.path) / QUALITY_PAGE
    print_quality(built.manifest, built.path, was_there=built.was_there, page=report if report.exists() else None)


def _print_merge_failures(built: "BuiltDataset", chosen: Settings, model: str | None) -> None:
    from trainspan_cli.clients.tokenizers import tokenizer_places
    from trainspan_cli.views.dataset_quality import print_merge_failures
    from trainspan_processing.dataset.published import Published
    from trainspan_processing.merging.unmerged import first_of_each, unmerged_rows
    from trainspan_processing.text.token_text import find_decoder

    decoder = find_decoder(tokenizer_places(model, chosen))
    published = Published(built.path, built.manifest)
    print_merge_failures(first_of_each(unmerged_rows(published, decoder)), built.path, decoder)
