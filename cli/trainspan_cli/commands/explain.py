"""`trainspan explain`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import (
    ConfigOption,
    Format,
    FormatOption,
    PolicyOption,
    StoresOption,
    TokenizerOption,
    settings,
)
from trainspan_loop.addresses import stores_of
from trainspan_schemas.config.policy_scope import scoped
from trainspan_schemas.errors import UsageError

if TYPE_CHECKING:
    from trainspan_processing.explain.account import RolloutAccount


@setting_options("dataset", "credit", "baseline", "reward", "reward_name", "gamma")
def explain(
    *,
    rollout: Annotated[
        str, typer.Argument(help="Id of a rollout or a prefix of it; newest: the one that ended last (in the dataset).")
    ] = "newest",
    store: StoresOption = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Explain the credit in this dataset (folder or URL), e.g. .trainspan/dataset/round-0003."),
    ] = None,
    attempt: Annotated[int | None, typer.Option(help="Number of the attempt [default: the last].")] = None,
    policy: PolicyOption = None,
    given: Given,
    model: TokenizerOption = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page to this file.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten texts.")] = False,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Explain one rollout: its calls, its rewards with their binding rules, its credit in numbers, tokens by advantage.

    The credit is the one that `trainspan dataset` computes with the same settings over the rollouts of that round; with
    --policy it is that of one of several policies.

    Example: trainspan explain 0c6c60ab --html rollout.html
    """
    import time

    from trainspan_processing.dataset.mirror import local_dataset
    from trainspan_processing.dataset.published import open_published
    from trainspan_processing.explain.explain import explain_rollout
    from trainspan_processing.explain.inquiry import Question
    from trainspan_processing.text.tokenizer_places import tokenizer_places
    from trainspan_processing.traces.trace_index import Clock
    from trainspan_schemas.config.load import override

    chosen = scoped(settings(config), policy) if policy else settings(config)
    published = open_published(local_dataset(dataset, with_earlier=True)) if dataset else None
    account = explain_rollout(
        Question(
            stores=stores_of(chosen, store or (published.stores if published else None)),
            rollout=rollout,
            attempt=attempt,
            settings=override(chosen.dataset, **given),
            dataset=published,
            models=tokenizer_places(model, chosen),
        ),
        Clock(time.time_ns, time.sleep),
    )
    if html is not None:
        _write_page(account, html)
    if format == "json":
        print(json.dumps(account.record()))
        return
    from trainspan_cli.views.explanation import print_explanation

    print_explanation(account, full=full)
    if html is not None:
        print(f"\npage: {html}")


def _write_page(account: "RolloutAccount", path: Path) -> None:
    """Raises UsageError."""
    from trainspan_viewer.pages.rollout.rollout import explanation_page

    try:
        path.write_text(explanation_page(account), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
