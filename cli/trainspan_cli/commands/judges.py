"""`trainspan judges`."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from trainspan_cli.settings import ConfigOption, Format, FormatOption, StoresOption, settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from trainspan_schemas.artifacts.judge_report import Comparison, JudgeReport


def judges(
    *,
    store: StoresOption = None,
    run: Annotated[str | None, typer.Option(help="Only rollouts of this run.")] = None,
    round: Annotated[int | None, typer.Option(help="Only rollouts of this round.")] = None,
    threshold: Annotated[float, typer.Option(help="The least score that passes.")] = 0.5,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare judges with people's labels and with each other: agreement, kappa, calibration, biases, and cost of a verdict.

    Example: trainspan judges --run 20260102-030405-0a1b2c3d
    """
    from trainspan_loop.addresses import stores_of
    from trainspan_processing.agreement.report import judge_report
    from trainspan_processing.read.source import Source
    from trainspan_schemas.artifacts.judge_report import judge_figures
    from trainspan_schemas.errors import UsageError

    if not threshold - threshold == 0:
        raise UsageError(f"--threshold {threshold}: it must be a finite number")
    with Source(stores_of(settings(config), store)) as source:
        report = judge_report(source, judge_figures(), run_id=run, round_=round, threshold=threshold)
    if format == "json":
        print(json.dumps(report))
    else:
        _print(report)


def _print(report: "JudgeReport") -> None:
    from rich.console import Console

    console = Console()
    gone = report["labels_without_rollout"]
    more = f"; {gone} labels are of rollouts that are not stored" if gone else ""
    console.print(f"{report['labeled']} of {report['rollouts']} rollouts are labeled{more}", highlight=False)
    raters = [
        (rater["name"], rater["rollouts"], f"{rater['mean']:.3g}", f"{rater['passed']:.1%}", *_cost(rater["figures"]))
        for rater in report["raters"]
    ]
    _table(console, ("scored by", "rollouts", "mean", "passed", "requests/verdict", "tokens/verdict"), raters)
    if left_out := report["raters_left_out"]:
        console.print(f"{left_out} of them are not compared: others score more rollouts", highlight=False)
    _table(
        console,
        ("first", "second", "rollouts", "tasks", "agreement", "kappa", "only first", "only second"),
        map(_comparison, report["comparisons"]),
    )
    _print_biases(console, report)
    if report["n_disagreements"]:
        print(
            f"{report['n_disagreements']} disagreements with people: --format json lists them, and trainspan view, page judges"
        )


def _print_biases(console: "Console", report: "JudgeReport") -> None:
    lengths = [
        (
            each["a"],
            length["n"],
            _value(length["correlation"], length["interval"]),
            f"{length['shorter']:+.3f}",
            f"{length['longer']:+.3f}",
        )
        for each in report["comparisons"]
        if (length := each["length"])
    ]
    _table(console, ("bias by length of", "rollouts", "correlation", "shorter half", "longer half"), lengths)
    bins = [
        (
            each["a"],
            f"{part['low']:.1f}–{part['high']:.1f}",
            part["n"],
            f"{part['mean']:.3g}",
            _value(part["good"], part["interval"]),
        )
        for each in report["comparisons"]
        for part in each["calibration"]
    ]
    _table(console, ("calibration of", "score", "rollouts", "mean score", "people say good"), bins)
    pairs = [
        (each["rater"], each["n"], each["ties"], _value(each["share"], each["interval"])) for each in report["pairs"]
    ]
    _table(console, ("on pairs", "pairs", "equal scores", "agrees with people"), pairs)
    places = [(each["rater"], each["n"], _value(each["bias"], each["interval"])) for each in report["position"]]
    _table(
        console, ("bias by position of", "pairs or groups", "label: left is better; judge: gain of the first"), places
    )


def _comparison(each: "Comparison") -> tuple[object, ...]:
    return (
        each["a"],
        each["b"],
        each["n"],
        each["tasks"],
        _value(each["agreement"]["mean"], each["agreement_interval"]),
        _value(each["kappa"], each["kappa_interval"]),
        f"{each['milder']:.1%}",
        f"{each['stricter']:.1%}",
    )


def _cost(figures: "Mapping[str, float]") -> tuple[str, str]:
    """Requests and tokens for each verdict."""
    verdicts = figures.get("verdicts", 0)
    if not verdicts:
        return "–", "–"
    tokens = figures.get("prompt_tokens", 0) + figures.get("completion_tokens", 0)
    return f"{figures.get('requests', 0) / verdicts:.3g}", f"{tokens / verdicts:.4g}"


def _value(value: float | None, interval: "Sequence[float] | None") -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def _table(console: "Console", head: "Sequence[str]", rows: "Iterable[Sequence[object]]") -> None:
    """A table, unless there are no rows."""
    from rich.table import Table
    from rich.text import Text

    from trainspan_processing.text.safe_text import visible

    listed = list(rows)
    if not listed:
        return
    table = Table(*head, box=None, pad_edge=False)
    for row in listed:
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    console.print(table)
