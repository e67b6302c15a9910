"""What the judges of runs counted."""

from pathlib import Path

import pytest

from trainspan_schemas.artifacts.judge_report import JudgeFigures, judge_figures, write_judge_figures


def _figures(run_id: str, verdicts: int) -> JudgeFigures:
    return JudgeFigures(judge="j.py:score", run_id=run_id, round=0, verdicts=verdicts, figures={"requests": 4.0})


def test_the_figures_of_all_runs_are_read_in_order_without_lines_of_another_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    written = [_figures(run_id, verdicts) for run_id in ("a", "b", "c") for verdicts in (5, 6)]
    for figures in reversed(written):
        folder = tmp_path / "rollouts" / figures["run_id"]
        folder.mkdir(parents=True, exist_ok=True)
        write_judge_figures(folder, figures)
    with (tmp_path / "rollouts" / "a" / "judges.jsonl").open("a") as lines:
        lines.write('{"judge": "j.py:score", "verdicts": 9}\n')
    assert judge_figures() == [_figures(run_id, verdicts) for run_id in ("a", "b", "c") for verdicts in (6, 5)]
