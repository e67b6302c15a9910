"""`trainspan judges` on a store: who is compared, and what is left out."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.labels import label, pair, send_labels
from tests.processing.support.traces import TestRollout, chain
from trainspan_cli.main import run
from trainspan_schemas.artifacts.judge_report import JudgeFigures, JudgeReport, write_judge_figures
from trainspan_schemas.intervals import share_interval
from trainspan_schemas.store.roles import Role, token_of
from trainspan_schemas.telemetry import keys

JUDGE = {keys.EVALUATION_SOURCE: "judge"}


def _judged(bench: Bench, name: str, task: str, score: float, **more: Any) -> TestRollout:
    return chain(bench.rollout(name, judge="j.py:score", task=task, **more), 1).reward(score, **JUDGE)


def _report(bench: Bench, capsys: pytest.CaptureFixture[str], *arguments: str) -> JudgeReport:
    store = str(bench.collectors[0].store)
    capsys.readouterr()
    assert run(["judges", "--store", store, "--run", bench.run_id, "--format", "json", *arguments]) == 0
    report: JudgeReport = json.loads(capsys.readouterr().out)
    return report


def _compared(report: JudgeReport) -> Sequence[tuple[str, str, int]]:
    return [(each["a"], each["b"], each["n"]) for each in report["comparisons"]]


def test_judges_criteria_clicks_and_people_are_compared(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    a, b, c = (
        _judged(bench, name, task, score) for name, task, score in (("a", "t", 1.0), ("b", "t", 0.0), ("c", "u", 1.0))
    )
    a.reward(0.0, **JUDGE, **{keys.EVALUATION_NAME: "polite", keys.EVALUATION_EXPLANATION: "it is rude"})
    a.log_reward(0.0, at=50.0, **{keys.EVALUATION_SOURCE: "human"})
    bench.send(a, b, c)
    grpc = bench.collectors[0].grpc
    send_labels(grpc, label(a, "bad", reason="wrong"), label(b, "bad"), label(c, "good"))
    send_labels(grpc, label(a, "good", 50.0, by="bob"), label(c, "withdrawn", 500.0), *pair((b, a), "worse"))
    folder = tmp_path / "home" / "rollouts" / bench.run_id
    folder.mkdir(parents=True)
    counted = {"requests": 4.0, "cached": 2.0, "prompt_tokens": 90.0, "completion_tokens": 10.0}
    bias = {"both_orders": 2.0, "position_bias": 0.1, "position_bias_error": 0.05}
    for figures in (counted, counted | bias):
        write_judge_figures(
            folder, JudgeFigures(judge="j.py:score", run_id=bench.run_id, round=0, verdicts=5, figures=figures)
        )
    report = _report(bench, capsys)
    assert (report["rollouts"], report["labeled"]) == (3, 2)
    assert _compared(report)[:1] == [("j.py:score", "label", 2)]
    assert {name for a, b, _ in _compared(report) for name in (a, b)} == {
        *("j.py:score", "j.py:score: polite", "human", "label", "label by ann", "label by bob"),
    }
    judge = next(rater for rater in report["raters"] if rater["name"] == "j.py:score")
    assert (judge["rollouts"], judge["figures"]["verdicts"], judge["figures"]["requests"]) == (3, 10, 8)
    (wrong,) = report["disagreements"]
    assert (wrong["rollout_id"], wrong["rater"], wrong["score"], wrong["label"], wrong["reason"]) == (
        *(a.rollout_id, "j.py:score", 1.0, "bad", "wrong"),
    )
    assert next((each["rater"], each["n"], each["agree"]) for each in report["pairs"]) == ("j.py:score", 1, 1)
    people, comparing = report["position"]
    assert (people["rater"], people["bias"]) == ("label", 0.0)
    assert (comparing["rater"], comparing["n"], comparing["bias"]) == ("j.py:score", 4 - 2, pytest.approx(0.1))
    assert run(["judges", "--store", str(bench.collectors[0].store), "--run", bench.run_id]) == 0
    assert "Cohen" not in capsys.readouterr().out
    assert run(["judges", "--store", str(bench.collectors[0].store), "--threshold", "nan"]) == 2


def test_what_others_say_is_no_label_and_gone_rollouts_are_counted(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    a = _judged(bench, "a", "t", 1.0)
    bench.send(a)
    tokens = bench.collectors[0].store.parent / "home" / "tokens.toml"
    imported = f"Bearer {token_of(tokens, Role.USER)}"
    send_labels(bench.collectors[0].grpc, label(a, "bad"), authorization=imported)
    gone = bench.rollout("gone")
    send_labels(bench.collectors[0].grpc, label(gone, "bad"))
    report = _report(bench, capsys)
    assert (report["labeled"], [rater["name"] for rater in report["raters"]]) == (0, ["j.py:score"])
    capsys.readouterr()
    assert run(["judges", "--store", str(bench.collectors[0].store), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels_without_rollout"] >= 1


def test_a_judge_whose_name_begins_like_peoples_is_a_judge(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    named = {"a": "labels.py:score", "b": "labels.py:score", "c": "label", "d": "label by bob"}
    rollouts = [chain(bench.rollout(name, judge=judge, task=name), 1) for name, judge in named.items()]
    bench.send(*(rollout.reward(score, **JUDGE) for rollout, score in zip(rollouts, (0.6, 0.5, 0.6, 0.6), strict=True)))
    labels = [*(label(rollout, "bad") for rollout in rollouts), *pair(rollouts[:2], "better")]
    send_labels(bench.collectors[0].grpc, *labels)
    report = _report(bench, capsys, "--threshold", "0.8")
    assert {rater["name"]: rater["passed"] for rater in report["raters"]} == {
        **dict.fromkeys(("labels.py:score", "no person: label", "no person: label by bob", "label"), 0.0),
    }
    assert [(each["a"], each["b"], each["n"]) for each in report["comparisons"]] == [
        ("labels.py:score", "label", 2),
        ("no person: label", "label", 1),
        ("no person: label by bob", "label", 1),
    ]
    assert [(each["rater"], each["agree"]) for each in report["pairs"]] == [("labels.py:score", 1)]
    report = _report(bench, capsys, "--threshold", "0.5")
    assert {each["rater"] for each in report["disagreements"]} == {
        *("labels.py:score", "no person: label", "no person: label by bob"),
    }


@pytest.mark.parametrize("boundary", [None, "process"])
def test_the_runners_span_says_who_judged_whatever_other_spans_a_program_sends(
    bench: Bench, capsys: pytest.CaptureFixture[str], boundary: str | None
) -> None:
    a = _judged(bench, "a", "t", 1.0)
    more = {} if boundary is None else {"trainspan__rollout__boundary": boundary}
    a.span("0", 0.5, 90, trainspan__rollout__status="ok", **more)
    bench.send(a)
    send_labels(bench.collectors[0].grpc, label(a, "good"))
    assert _compared(_report(bench, capsys)) == [("j.py:score", "label", 1)]


def test_many_criteria_do_not_crowd_out_people(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = [_judged(bench, name, name, 1.0) for name in ("a", "b", "c")]
    for rollout, number in itertools.product(rollouts, range(12)):
        rollout.reward(0.5, **JUDGE, **{keys.EVALUATION_NAME: f"criterion {number}"})
    bench.send(*rollouts)
    send_labels(bench.collectors[0].grpc, *(label(rollout, "good") for rollout in rollouts[:2]))
    report = _report(bench, capsys)
    assert len(report["raters"]) == 14
    assert report["raters_left_out"] == 1
    assert sum(b == "label" for _, b, _ in _compared(report)) == 12
    assert run(["judges", "--store", str(bench.collectors[0].store), "--run", bench.run_id]) == 0
    assert "1 of them are not compared" in capsys.readouterr().out


def test_the_pairs_of_one_task_count_once(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    many = [_judged(bench, f"a{n}", "t", n / 10) for n in range(6)]
    two = [_judged(bench, f"b{n}", "u", n / 10) for n in range(2)]
    bench.send(*many, *two)
    grpc = bench.collectors[0].grpc
    send_labels(grpc, *(each for worse, better in itertools.pairwise(many) for each in pair((better, worse), "better")))
    alone = _report(bench, capsys)
    assert [(each["n"], each["share"], each["interval"]) for each in alone["pairs"]] == [(5, 1.0, None)]
    assert [(each["n"], each["bias"], each["interval"]) for each in alone["position"]] == [(5, 1.0, None)]
    send_labels(grpc, *pair((two[1], two[0]), "worse"))
    both = _report(bench, capsys)
    ((judge,), (people,)) = both["pairs"], both["position"]
    assert (judge["n"], judge["agree"], judge["share"], people["bias"]) == (6, 5, 0.5, 0.5)
    assert judge["interval"] == people["interval"] == pytest.approx(share_interval(1, 2))
