"""The tables of `trainspan judges`: each row names its rater, and each value stands under its head."""

import pytest

from trainspan_cli.commands.judges import _print
from trainspan_schemas.artifacts.judge_report import Comparison, JudgeReport


def test_each_table_names_the_judge_that_it_is_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    comparison: Comparison = {
        "a": "strict",
        "b": "label",
        "n": 40,
        "tasks": 20,
        "agreement": {"n": 20, "mean": 0.75, "deviation": 0.3, "binary": False, "n_rollouts": 40, "left_out": 0},
        "agreement_interval": (0.6, 0.9),
        "kappa": None,
        "kappa_interval": None,
        "milder": 0.05,
        "stricter": 0.2,
        "brier": 0.1,
        "calibration": [{"low": 0.2, "high": 0.4, "n": 7, "mean": 0.31, "good": 0.5, "interval": None}],
        "length": {"n": 39, "correlation": 0.25, "interval": (-0.1, 0.5), "shorter": -0.125, "longer": 0.25},
    }
    report: JudgeReport = {
        "run_id": None,
        "round": None,
        "threshold": 0.5,
        "rollouts": 50,
        "labeled": 41,
        "labels_without_rollout": 2,
        "raters": [
            {
                "name": "strict",
                "rollouts": 48,
                "mean": 0.375,
                "passed": 0.25,
                "figures": {"verdicts": 8, "requests": 12, "prompt_tokens": 700, "completion_tokens": 100},
            }
        ],
        "raters_left_out": 3,
        "comparisons": [comparison],
        "pairs": [{"rater": "strict", "n": 9, "agree": 6, "ties": 1, "share": 0.75, "interval": (0.5, 1.0)}],
        "position": [{"rater": "lefty", "n": 11, "bias": 0.125, "interval": None}],
        "disagreements": [],
        "n_disagreements": 6,
    }
    _print(report)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "41 of 50 rollouts are labeled; 2 labels are of rollouts that are not stored",
        "scored by rollouts mean passed requests/verdict tokens/verdict",
        "strict 48 0.375 25.0% 1.5 100",
        "3 of them are not compared: others score more rollouts",
        "first second rollouts tasks agreement kappa only first only second",
        "strict label 40 20 0.750 [0.600, 0.900] – 5.0% 20.0%",
        "bias by length of rollouts correlation shorter half longer half",
        "strict 39 0.250 [-0.100, 0.500] -0.125 +0.250",
        "calibration of score rollouts mean score people say good",
        "strict 0.2–0.4 7 0.31 0.500",
        "on pairs pairs equal scores agrees with people",
        "strict 9 1 0.750 [0.500, 1.000]",
        "bias by position of pairs or groups label: left is better; judge: gain of the first",
        "lefty 11 0.125",
        "6 disagreements with people: --format json lists them, and trainspan view, page judges",
    ]
