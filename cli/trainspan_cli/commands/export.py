"""`trainspan export`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainspan_cli.export_options import (
    KINDS,
    AgentOption,
    AllOption,
    FormOption,
    MinRewardOption,
    RoundOption,
    RunOption,
    export_request,
    run_export,
)
from trainspan_cli.settings import ConfigOption, Format, FormatOption, TokenizerOption, settings

if TYPE_CHECKING:
    from trainspan_processing.export.export import Exported


def export(
    kind: Annotated[
        str,
        typer.Argument(
            help="sft: the best rollout of each group, or --all; dpo: its best and its worst; kto: all, good or bad; "
            "atif: trajectories; rows, openenv: tokens with advantages."
        ),
    ],
    dataset: Annotated[
        str,
        typer.Argument(
            help="Folder or URL of a dataset, a folder of datasets, or a store if no dataset can be built (a vendor's model)."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="JSON lines file to write.")],
    store: Annotated[
        list[str] | None,
        typer.Option(
            help="Store with the messages, or a further store to export; may be repeated [default: those of the dataset]."
        ),
    ] = None,
    run: RunOption = None,
    round: RoundOption = None,
    min_reward: MinRewardOption = None,
    all: AllOption = False,
    agent: AgentOption = None,
    form: FormOption = "chat",
    model: TokenizerOption = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Export rollouts as training files for TRL: SFT (prompt, completion), DPO (prompt, chosen, rejected) or KTO (prompt, completion,
    label); as ATIF trajectories for Harbor; or a dataset's tokens, as rows for TRL and verl or as OpenEnv's training traces.

    Example: trainspan export sft .trainspan/dataset/round-0003 sft.jsonl --min-reward 1
    """
    from trainspan_schemas.errors import UsageError

    wanted = KINDS.get(kind)
    if wanted is None:
        raise UsageError(f"no export {kind!r}: use {', '.join(KINDS)}")
    request = export_request(
        wanted,
        dataset,
        store or (),
        out,
        settings(config),
        run=run,
        round=round,
        min_reward=min_reward,
        take_all=all,
        agents=agent,
        form=form,
        model=model,
    )
    done = run_export(request)
    if format == "json":
        record = {"examples": done.examples, "groups": done.groups, "groups_used": done.groups_used}
        print(json.dumps({"path": str(done.path), **record, "skipped": dict(done.skipped)}))
    else:
        _print_summary(kind, done)


def _print_summary(kind: str, done: "Exported") -> None:
    lines = {"dpo": "pairs", "atif": "trajectories", "openenv": "traces", "rows": "rows"}.get(kind, "examples")
    unit = "rollouts" if kind in ("atif", "openenv", "rows") else "groups"
    print(f"{done.path}: {done.examples} {lines} of {done.groups_used} of {done.groups} {unit}")
    for reason, count in done.skipped.items():
        print(f"  skipped: {reason} {count}")
    if kind not in ("atif", "openenv"):
        print(f'load it with: datasets.load_dataset("json", data_files="{done.path}", split="train")')
