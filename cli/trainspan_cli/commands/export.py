"""`trainspan export`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainspan_cli.settings import ConfigOption, FormatOption, settings

if TYPE_CHECKING:
    from trainspan_processing.export.export import Exported
    from trainspan_processing.text.token_text import Decoder


def export(
    kind: Annotated[str, typer.Argument(help="sft: the best rollout of each group; dpo: its best and its worst.")],
    dataset: Annotated[
        str, typer.Argument(help="Folder of a dataset, or a store if no dataset can be built (a vendor's model).")
    ],
    out: Annotated[Path, typer.Argument(help="JSON lines file to write.")],
    store: Annotated[
        list[str] | None,
        typer.Option(help="Store with the messages; may be repeated [default: the stores of the dataset]."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="From a store: only rollouts of this run.")] = None,
    round: Annotated[int | None, typer.Option(help="From a store: only rollouts of this round.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Skip groups whose best reward is lower.")] = None,
    agent: Annotated[list[str] | None, typer.Option(help="Only this agent's calls; may be repeated.")] = None,
    form: Annotated[
        str, typer.Option(help="chat: recorded messages; text: the dataset's tokens, decoded exactly.")
    ] = "chat",
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer decodes [default: the one served].")] = None,
    config: ConfigOption = None,
    format: FormatOption = "table",
) -> None:
    """Export rollouts as training files for TRL: SFT (prompt and completion) or DPO (prompt, chosen, rejected).

    Example: trainspan export sft .trainspan/dataset/round-0003 sft.jsonl --min-reward 1
    """
    import time

    from trainspan_processing.dataset.published import open_published
    from trainspan_processing.export.export import ExportRequest
    from trainspan_processing.export.export import export as write_examples
    from trainspan_processing.traces.trace_index import Clock
    from trainspan_schemas.errors import UsageError

    if kind not in ("sft", "dpo"):
        raise UsageError(f"no export {kind!r}: use sft or dpo")
    if form not in ("chat", "text"):
        raise UsageError(f"no form {form!r}: use chat or text")
    is_store = dataset.startswith("grpc") or Path(dataset).is_file()
    published = None if is_store else open_published(Path(dataset))
    chosen = settings(config)
    done = write_examples(
        ExportRequest(
            kind="sft" if kind == "sft" else "dpo",
            out=out,
            stores=tuple(store or (published.stores if published else [dataset])),
            dataset=published,
            settings=chosen.dataset,
            run_id=run,
            round=round,
            min_reward=min_reward,
            agents=frozenset(agent or ()),
            decoder=_decoder(model, chosen.serving.model) if form == "text" else None,
        ),
        Clock(time.time_ns, time.sleep),
    )
    if format == "json":
        record = {"examples": done.examples, "groups": done.groups, "groups_used": done.groups_used}
        print(json.dumps({"path": str(done.path), **record, "skipped": dict(done.skipped)}))
    else:
        _print_summary(kind, done)


def _decoder(model: str | None, configured: str | None) -> "Decoder":
    from trainspan_processing.text.token_text import find_decoder, load_decoder
    from trainspan_schemas.errors import UsageError
    from trainspan_schemas.home import served_model

    if model is not None:
        return load_decoder(model)
    found = find_decoder((configured, served_model()))
    if found is None:
        raise UsageError("--form text needs a tokenizer: name its model directory with --model")
    return found


def _print_summary(kind: str, done: "Exported") -> None:
    print(
        f"{done.path}: {done.examples} {'examples' if kind == 'sft' else 'pairs'} of {done.groups_used} of {done.groups} groups"
    )
    for reason, count in done.skipped.items():
        print(f"  skipped: {reason} {count}")
    print(f'load it with: datasets.load_dataset("json", data_files="{done.path}", split="train")')
