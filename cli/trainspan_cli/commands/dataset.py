"""`trainspan dataset`."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, PolicyOption, StoresOption, settings
from trainspan_loop.addresses import stores_of
from trainspan_schemas.command_events import DatasetBuilt, NoDataset, event_line
from trainspan_schemas.config.load import override
from trainspan_schemas.config.policy_scope import Policy, scoped
from trainspan_schemas.config.settings import Settings

if TYPE_CHECKING:
    from trainspan_processing.assembly.build import BuildRequest, BuiltDataset
    from trainspan_processing.read.engine import Engine

gc.set_threshold(100_000, 20, 50)  # libraries and frames make objects by the thousands, and hardly any cycles


_SinceSeqOption = Annotated[
    list[int] | None,
    typer.Option(
        help="Only rollouts that came into the store after this place (the views' column seq); "
        "with several stores, one for each, in their order."
    ),
]
_ShowMergeFailuresOption = Annotated[
    bool,
    typer.Option(
        "--show-merge-failures", help="Show for each cause the tokens at which a call departs from the previous one."
    ),
]


@setting_options("dataset")
def dataset(
    *,
    store: StoresOption = None,
    run: Annotated[str | None, typer.Option(help="Only rollouts of this run.")] = None,
    round: Annotated[int | None, typer.Option(help="Only rollouts of this round; also the dataset's number.")] = None,
    since_round: Annotated[int | None, typer.Option(help="Only rollouts of this round or later.")] = None,
    since_seq: _SinceSeqOption = None,
    number: Annotated[
        int | None, typer.Option(help="The dataset's number [default: --round, else the next free one].")
    ] = None,
    policy: PolicyOption = None,
    given: Given,
    again: Annotated[
        str | None,
        typer.Option(help="Rebuild this dataset under --out, from its manifest alone, and compare the bytes."),
    ] = None,
    allow_behind: Annotated[
        bool, typer.Option("--allow-behind", help="Build even if the store has not loaded all acknowledged data.")
    ] = False,
    show_merge_failures: _ShowMergeFailuresOption = False,
    model: Annotated[
        str | None, typer.Option(help="Model whose tokenizer decodes these tokens [default: the one served].")
    ] = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Build the next dataset from all complete rollouts that no earlier dataset used.

    With --policy it has only the calls of that policy and is written to the policy's folder under --out.

    Example: trainspan dataset --wait-s 30 --baseline rloo
    """
    chosen = settings(config) if again is not None else scoped(settings(config), policy)
    scope = {
        "run_id": run,
        "round": round,
        "since_round": since_round,
        "since_seq": tuple(since_seq or ()) or None,
        "number": number,
    }
    request = _request(chosen, given, store, policy, **scope, allow_behind=allow_behind)
    with _engine(request.settings.engine, chosen) as engine:
        as_json = format == "json"
        built = _rebuilt(again, request, store, engine) if again else _built(request, engine, as_json=as_json)
    if format == "json":
        rows_url = None if request.mirror is None else request.mirror.rows_url(built.path)
        print(event_line(DatasetBuilt(built.place, built.sha256, built.manifest, rows_url)))
        return
    _print(built)
    if show_merge_failures:
        _print_merge_failures(built, chosen, model)


def _request(chosen: Settings, given: Given, stores: list[str] | None, policy: Policy, **scope: Any) -> "BuildRequest":
    """The request: the settings with the given options; `--out` is the dataset's destination, not one of its settings."""
    from trainspan_processing.assembly.build import BuildRequest
    from trainspan_processing.dataset.mirror import Mirror
    from trainspan_schemas.home import datasets_dir, is_url, policy_dir

    out = given.pop("out") or chosen.dataset.out
    mirror = Mirror.of(f"{out.rstrip('/')}/{policy}" if policy else out) if out and is_url(out) else None
    return BuildRequest(
        stores=stores_of(chosen, stores),
        out=mirror.known if mirror else policy_dir(datasets_dir(out), policy),
        mirror=mirror,
        settings=override(chosen.dataset, **given),
        **scope,
    )


@contextlib.contextmanager
def _engine(name: str, chosen: Settings) -> "Iterator[Engine]":
    """Where the dataset is computed. Raises what connecting to Ray raises."""
    from trainspan_processing.read.engine import OneProcess
    from trainspan_processing.read.ray_engine import RayEngine

    if name == "local":
        yield OneProcess()
    else:
        from trainspan_cli.clients.ray_cluster import ray_cluster

        with ray_cluster(chosen):
            yield RayEngine(chosen.ray)


def _built(request: "BuildRequest", engine: "Engine", *, as_json: bool) -> "BuiltDataset":
    """Builds the next dataset. If there is none, or a store does not answer, `as_json` prints the reason as JSON."""
    import time

    from trainspan_processing.assembly.build import build_dataset
    from trainspan_processing.traces.trace_index import Clock
    from trainspan_schemas.errors import NothingToTrainError, StoreError
    from trainspan_viewer.pages.quality import QUALITY_PAGE, quality_page

    try:
        return build_dataset(request, Clock(time.time_ns, time.sleep), {QUALITY_PAGE: quality_page}, engine)
    except NothingToTrainError as error:
        if as_json:
            print(event_line(NoDataset(nothing_to_train=str(error), figures=error.figures)))
        raise
    except StoreError as error:
        if as_json:
            print(event_line(NoDataset(store_error=str(error))))
        raise


def _rebuilt(original: str, request: "BuildRequest", stores: list[str] | None, engine: "Engine") -> "BuiltDataset":
    """Rebuilds the dataset `original`. Raises DatasetError if a byte differs."""
    import time

    from trainspan_processing.assembly.rebuild import rebuild
    from trainspan_processing.dataset.mirror import known_dataset
    from trainspan_processing.traces.trace_index import Clock
    from trainspan_schemas.errors import DatasetError
    from trainspan_schemas.home import is_url
    from trainspan_viewer.pages.quality import QUALITY_PAGE, quality_page

    clock, pages = Clock(time.time_ns, time.sleep), {QUALITY_PAGE: quality_page}
    folder = known_dataset(original, with_earlier=True)[1] if is_url(original) else Path(original)
    rebuilt = rebuild(folder, request.out, stores, clock, pages, engine, request.mirror)
    if rebuilt.differences:
        differences = "; ".join(rebuilt.differences)
        raise DatasetError(f"{original} differs from its rebuild at {rebuilt.built.place}: {differences}")
    return rebuilt.built


def _print(built: "BuiltDataset") -> None:
    from trainspan_cli.views.dataset_quality import print_quality
    from trainspan_schemas.artifacts.dataset import about_dir
    from trainspan_viewer.pages.quality import QUALITY_PAGE

    report = about_dir(built.path) / QUALITY_PAGE
    print_quality(built.manifest, built.place, was_there=built.was_there, page=report if report.exists() else None)


def _print_merge_failures(built: "BuiltDataset", chosen: Settings, model: str | None) -> None:
    from trainspan_cli.views.dataset_quality import print_merge_failures
    from trainspan_processing.dataset.mirror import local_dataset
    from trainspan_processing.dataset.published import Published
    from trainspan_processing.merging.unmerged import first_of_each, unmerged_rows
    from trainspan_processing.text.token_text import find_decoder
    from trainspan_processing.text.tokenizer_places import tokenizer_places

    decoder = find_decoder(tokenizer_places(model, chosen))
    published = Published(local_dataset(built.place), built.manifest)
    print_merge_failures(first_of_each(unmerged_rows(published, decoder)), built.place, decoder)
