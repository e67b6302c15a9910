"""The options that choose rollouts for supervised files, and the request made of them, for `export` and `sft`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

import typer

from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry.status import kind_named

if TYPE_CHECKING:
    from trainspan_processing.export.export import Exported, ExportRequest
    from trainspan_processing.text.token_text import Decoder

__all__ = [
    "KINDS",
    "AgentOption",
    "AllOption",
    "FormOption",
    "MinRewardOption",
    "RoundOption",
    "RunOption",
    "export_request",
    "run_export",
]

Kind = Literal["sft", "dpo", "kto", "atif", "openenv", "rows"]
KINDS: Final[Mapping[str, Kind]] = {name: name for name in get_args(Kind)}
RunOption = Annotated[str | None, typer.Option("--run", help="From a store: only rollouts of this run.")]
RoundOption = Annotated[int | None, typer.Option("--round", help="From a store: only rollouts of this round.")]
MinRewardOption = Annotated[
    float | None, typer.Option(help="Skip groups whose best reward is lower; for kto: what is good.")
]
AgentOption = Annotated[
    list[str] | None, typer.Option(help="Only this agent's calls; may be repeated [default: dataset.agents].")
]
AllOption = Annotated[
    bool,
    typer.Option(
        "--all", help="All rollouts with at least --min-reward, not only the shortest best one of each group."
    ),
]
FormOption = Annotated[
    str, typer.Option("--form", help="chat: recorded messages; text: the dataset's tokens, decoded exactly.")
]


def export_request(
    kind: Kind,
    source: str | None,
    stores: Sequence[str],
    out: Path,
    settings: Settings,
    *,
    run: str | None,
    round: int | None,
    min_reward: float | None,
    take_all: bool,
    agents: Sequence[str] | None,
    form: str,
    model: str | None,
) -> "ExportRequest":
    """The request for an export of `source`: the folder or URL of a dataset, a folder of datasets, or a store (path or grpc:// address).

    The `stores` hold the messages of a dataset's rollouts, or are exported together with a `source` that is a store. Without
    `source`, the rollouts are those of the `stores`. Raises UsageError.
    """
    from trainspan_processing.dataset.mirror import local_dataset
    from trainspan_processing.dataset.published import open_published
    from trainspan_processing.export.export import ExportRequest

    if kind in ("atif", "openenv", "rows") and (min_reward is not None or form != "chat"):
        raise UsageError(f"--min-reward and --form are for sft, dpo and kto: {kind} has every rollout with its reward")
    if take_all and kind != "sft":
        raise UsageError(
            "--all is for sft: dpo pairs a group's best and worst rollout, and the others take all of them"
        )
    if form not in ("chat", "text"):
        raise UsageError(f"no form {form!r}: use chat or text")
    is_store = source is None or source.startswith("grpc") or Path(source).is_file()
    # A dataset's rows are those of `dataset.agents` already, by name or kind.
    if agents is None and settings.dataset.agents is not None and kind not in ("openenv", "rows"):
        agents = [name.strip() for name in settings.dataset.agents.split(",")]
    if any(kind_named(name) for name in agents or ()):
        raise UsageError(
            f"agents = {', '.join(agents or ())}: conversations are selected by agents' names, not by kinds: give --agent NAME"
        )
    folder = None if source is None or is_store else local_dataset(source)
    datasets = () if folder is None else tuple(map(open_published, _datasets_of(folder)))
    built_from = [store for dataset in datasets for store in dataset.stores]
    given_stores = [source] if source is not None and is_store else []
    return ExportRequest(
        kind=kind,
        out=out,
        stores=tuple(dict.fromkeys((*given_stores, *stores) or built_from)),
        datasets=datasets,
        settings=settings.dataset,
        run_id=run,
        round=round,
        min_reward=min_reward,
        take_all=take_all,
        agents=frozenset(agents or ()),
        decoder=_decoder(model, settings.serving.model) if form == "text" else None,
    )


def _datasets_of(folder: Path) -> list[Path]:
    """The folder itself, or the datasets in it, such as those of all rounds of a run, without those that have no rows."""
    from trainspan_schemas.artifacts.dataset import dataset_dirs, manifest_path

    folders = [] if manifest_path(folder).exists() else dataset_dirs(folder)
    return [
        dataset_folder for dataset_folder in folders if json.loads(manifest_path(dataset_folder).read_bytes())["rows"]
    ] or [folder]


def run_export(request: "ExportRequest") -> "Exported":
    """Writes the file."""
    import time

    from trainspan_processing.export.export import export
    from trainspan_processing.traces.trace_index import Clock

    return export(request, Clock(time.time_ns, time.sleep))


def _decoder(model: str | None, configured: str | None) -> "Decoder":
    from trainspan_processing.text.token_text import find_decoder, load_decoder
    from trainspan_schemas.home import served_model

    if model is not None:
        return load_decoder(model)
    decoder = find_decoder((configured, served_model()))
    if decoder is None:
        raise UsageError("--form text needs a tokenizer: name its model directory with --model")
    return decoder
