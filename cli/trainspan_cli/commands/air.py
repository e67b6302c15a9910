"""`trainspan air`."""

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, FormatOption, StoresOption, settings, stores_of
from trainspan_schemas.config.load import override
from trainspan_schemas.errors import UsageError

if TYPE_CHECKING:
    from trainspan_processing.branches.air_search import RuleSearch


@setting_options("dataset", "reward", "reward_name", "status_rewards")
def air(
    *,
    given: Given,
    run: Annotated[
        list[str] | None, typer.Option(help="Run of branched rollouts; may be repeated [default: the newest round].")
    ] = None,
    round: Annotated[int | None, typer.Option(help="Only this round of the runs [default: all rounds].")] = None,
    seed: Annotated[int, typer.Option(help="Draws the halves.")] = 0,
    store: StoresOption = None,
    config: ConfigOption = None,
    format: FormatOption = "table",
) -> int:
    """Search for rules of intermediate rewards (`[dataset] air`) that agree with measured advantages.

    Looks at calls whose advantages `trainspan branch` has measured: failed tools, parsing errors, repeated calls, and words in
    tool outputs. A rule is chosen on one half of the tasks and tested on the other; on data without any signal, at most one
    search of twenty finds a rule.

    Example: trainspan air --run my-run
    """
    from trainspan_processing.branches.air_search import search_rules
    from trainspan_processing.branches.air_signals import measured_signals
    from trainspan_processing.branches.candidates import newest_round
    from trainspan_processing.read.source import Selection, Source

    if format not in ("table", "json"):
        raise UsageError(f"--format {format}: must be table or json")
    if round is not None and not run:
        raise UsageError(f"--round {round}: name its run with --run")
    loaded = settings(config)
    dataset = override(loaded.dataset, **given)
    with Source(stores_of(loaded, store)) as source:
        newest = None if run else newest_round(source)
        selections = [Selection(name, round) for name in run or ()] + ([newest] if newest else [])
        calls, occurrences, ignored = measured_signals(source, selections, dataset, now_ns=time.time_ns())
    if calls.is_empty():
        raise UsageError(_nothing(ignored))
    found = search_rules(calls, occurrences, seed=seed)
    if format == "json":
        print(json.dumps({**found.record(), "ignored": ignored}))
    else:
        _print(found, ignored)
    return 0


def _nothing(ignored: int) -> str:
    if ignored:
        return (
            f"{ignored} measured calls are not used: their branches had another policy version than the rollout, or other settings "
            "of the reward; branch rollouts of the version that is served, with the reward as it is set here"
        )
    return "no call has a measured advantage: branch rollouts first, with trainspan branch"


def _print(found: "RuleSearch", ignored: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(
        f"{found.calls} measured calls of {found.rollouts} rollouts of {found.tasks} tasks: {found.rules} rules occur often enough, "
        f"{found.tested} of them were tested on the held-out half",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if ignored:
        console.print(f"{ignored} calls measured with another policy version or reward are not used", highlight=False)
    if not found.proposals:
        console.print("no rule agrees with the measured advantages", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("rule", "calls", "effect", "95 %", "proposed", "correlation", "p"):
        table.add_column(name, justify="left" if name == "rule" else "right", overflow="fold")
    for one in found.proposals:
        low, high = one.interval
        measured = (str(one.calls), f"{one.effect:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{one.score:+.3f}")
        numbers = (*measured, f"{one.correlation:+.3f}", f"{one.p:.4f}")
        table.add_row(Text(one.rule), *numbers)
    console.print(table)
    console.print(f"--air '{found.setting}'", markup=False, highlight=False, soft_wrap=True)
