"""How judges agree with people's labels and with each other."""

from collections.abc import Sequence

from trainspan_schemas.artifacts.judge_report import CalibrationBin, Comparison, Disagreement, JudgeReport
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, filter_form, isolated, link, table
from trainspan_viewer.html.formats import count, cut, number, share
from trainspan_viewer.html.paging import paging
from trainspan_viewer.queries.addresses import rollout_address
from trainspan_viewer.queries.labels.agreement import AgreementModel

__all__ = ["render_agreement"]

_LABEL = "label"


def render_agreement(model: AgreementModel) -> Page:
    report = model.report
    about = f"{count(report['labeled'])} of {count(report['rollouts'])} rollouts are labeled"
    if report["labels_without_rollout"]:
        about += f"; {count(report['labels_without_rollout'])} labels are of rollouts that are not stored"
    about += f". A score of {report['threshold']:g} or more passes."
    with_people = [each for each in report["comparisons"] if each["b"] == _LABEL]
    others = [each for each in report["comparisons"] if each["b"] != _LABEL]
    body: list[Child] = [
        filter_form("/judges", {name: model.params.text(name) for name in ("run", "round", "threshold")}),
        element("p", about, class_="note"),
        element("p", "Label some rollouts first: ", link("/labels", "what is worth labeling"), ".")
        if not report["labeled"]
        else None,
        _raters(report),
        element(
            "p",
            f"{count(report['raters_left_out'])} of them are not compared: others score more rollouts",
            class_="note",
        )
        if report["raters_left_out"]
        else None,
        element("h2", "Judges and people"),
        _comparisons(with_people) or element("p", "No rollout has both a verdict and a label.", class_="note"),
        *(part for each in with_people if each["calibration"] for part in _calibration(each)),
        _lengths(with_people),
        _pairs(report),
        _positions(report),
        *([element("h2", "Judges among each other"), _comparisons(others)] if others else []),
        element("h2", "Disagreements with people"),
        _disagreements(report["disagreements"][model.part.start : model.part.start + model.part.size])
        if report["disagreements"]
        else element("p", "None.", class_="note"),
        element(
            "p",
            f"{count(len(report['disagreements']))} of {count(report['n_disagreements'])} are listed",
            class_="note",
        )
        if report["n_disagreements"] > len(report["disagreements"])
        else None,
        paging(model.params.link, *model.part, "disagreements"),
    ]
    return Page("Judges", body, section="judges")


def _raters(report: JudgeReport) -> Element:
    rows: list[list[Child]] = []
    for rater in report["raters"]:
        figures = rater["figures"]
        verdicts = figures.get("verdicts", 0)
        tokens = figures.get("prompt_tokens", 0) + figures.get("completion_tokens", 0)
        rows.append(
            [
                isolated(rater["name"]),
                count(rater["rollouts"]),
                number(rater["mean"]),
                share(rater["passed"]),
                number(figures.get("requests", 0) / verdicts) if verdicts else "–",
                number(tokens / verdicts) if verdicts else "–",
            ]
        )
    head = ["who scores", "rollouts", "mean", "passed", "requests per verdict", "tokens per verdict"]
    return table(head, rows, caption="who scores rollouts, and what a verdict costs")


def _comparisons(comparisons: Sequence[Comparison]) -> Element | None:
    if not comparisons:
        return None
    rows: list[list[Child]] = [
        [
            isolated(each["a"]),
            isolated(each["b"]),
            f"{count(each['n'])} / {count(each['tasks'])}",
            _with_interval(each["agreement"]["mean"], each["agreement_interval"]),
            _with_interval(each["kappa"], each["kappa_interval"]),
            share(each["milder"]),
            share(each["stricter"]),
            number(each["brier"]),
        ]
        for each in comparisons
    ]
    head = [
        "first",
        "second",
        "rollouts / tasks",
        "agreement",
        "Cohen's κ",
        "only the first passes",
        "only the second",
        "Brier",
    ]
    return table(head, rows, text=frozenset({0, 1}), caption="agreement, each task once, with 95 % intervals")


def _calibration(comparison: Comparison) -> list[Child]:
    def row(each: CalibrationBin) -> list[Child]:
        return [
            f"{each['low']:.1f} to {each['high']:.1f}",
            count(each["n"]),
            number(each["mean"]),
            _with_interval(each["good"], each["interval"]),
        ]

    head = ["score", "rollouts", "mean score", "people say good"]
    caption = f"calibration of {comparison['a']}: a calibrated score is the share that people call good"
    return [table(head, [row(each) for each in comparison["calibration"]], caption=caption)]


def _lengths(comparisons: Sequence[Comparison]) -> Element | None:
    rows: list[list[Child]] = [
        [
            isolated(each["a"]),
            count(length["n"]),
            _with_interval(length["correlation"], length["interval"]),
            f"{length['shorter']:+.3f}",
            f"{length['longer']:+.3f}",
        ]
        for each in comparisons
        if (length := each["length"]) is not None
    ]
    head = ["judge", "rollouts", "correlation with length", "excess, shorter half", "excess, longer half"]
    caption = "bias by length: the judge's score minus the label's, against the sampled tokens"
    return table(head, rows, caption=caption) if rows else None


def _pairs(report: JudgeReport) -> Element | None:
    rows: list[list[Child]] = [
        [
            isolated(each["rater"]),
            count(each["n"]),
            count(each["ties"]),
            _with_interval(each["share"], each["interval"]),
        ]
        for each in report["pairs"]
    ]
    caption = "pairs of which people called one better: how often the judge gives that one more"
    return table(["judge", "pairs", "equal scores", "agrees"], rows, caption=caption) if rows else None


def _positions(report: JudgeReport) -> Element | None:
    rows: list[list[Child]] = []
    for each in report["position"]:
        what = (
            "share of pairs whose left one is better" if each["rater"] == _LABEL else "more of 1 for standing earlier"
        )
        rows.append([isolated(each["rater"]), what, count(each["n"]), _with_interval(each["bias"], each["interval"])])
    head = ["who", "what", "pairs or groups", "value"]
    return table(head, rows, text=frozenset({0, 1}), caption="bias by position") if rows else None


def _disagreements(rows: Sequence[Disagreement]) -> Element:
    cells: list[list[Child]] = [
        [
            link(
                f"{rollout_address(row['rollout_id'], attempt=row['attempt'])}#labels",
                isolated(cut(row["task_id"] or row["rollout_id"])),
            ),
            isolated(row["rater"]),
            number(row["score"]),
            row["label"],
            isolated(row["by"]),
            isolated(cut(row["reason"] or "–")),
            isolated(cut(row["explanation"] or "–")),
        ]
        for row in rows
    ]
    head = ["task", "judge", "score", "people", "by", "their reason", "the judge's reason"]
    return table(head, cells, text=frozenset({0, 1, 3, 4, 5, 6}), caption="the greatest differences first")


def _with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    return number(value, 3) + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")
