"""Skipped rounds: their reasons, their number, and the alarm."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainspan_loop.checks.skipping import skip_check, skip_reason, skipped_rounds
from trainspan_loop.processes.screen import Screen
from trainspan_loop.report.run_report import write_report
from trainspan_loop.state.run_folder import RunFolder

EMPTY = {"rows": 0, "calls_seen": 24, "dropped": {"zero_spread_group": 20, "validation": 4}}


def record(round_: int, skipped: str | None) -> dict[str, Any]:
    return {
        "kind": "round",
        "round": round_,
        "policy_version": 0,
        "skipped": skipped,
        "rollout": {"total": 8, "mean_reward": 0.5, "status": {"ok": 8}},
        "dataset": {"calls_seen": 24},
        "train": {},
        "seconds": {"rollouts": 2.0, "total": 3.0},
        "checks": [],
    }


def test_a_round_that_trained_is_not_skipped() -> None:
    assert skip_reason({"rows": 20, "calls_seen": 24, "dropped": {"no_reward": 4}}, None) is None


def test_a_round_is_skipped_for_a_reason_with_figures() -> None:
    shown = skip_reason(EMPTY, "the dataset has no rows")
    assert shown == "no contrast: none of 24 calls is trained (zero_spread_group 20, validation 4)"
    assert skip_reason({"rows": 5, "dropped": {}}, "its files are gone") == "its files are gone"


@pytest.mark.parametrize(
    ("earlier", "skipped", "in_a_row", "ok"),
    [
        ([], "no", 1, True),
        (["no"], "no", 2, True),
        (["no", "no"], "no", 3, False),
        (["no", "no", None], "no", 1, True),
        (["no", "no", "no"], None, 0, True),
    ],
)
def test_the_third_skipped_round_in_a_row_is_an_alarm(
    earlier: list[str | None], skipped: str | None, in_a_row: int, ok: bool
) -> None:
    records = [record(number, reason) for number, reason in enumerate(earlier, 1)]
    evaluated = [each for one in records for each in (one, {"kind": "eval"})]
    check = skip_check(evaluated, skipped)
    assert check.ok is ok
    assert check.detail.startswith(f"skipped, {in_a_row} in a row: no" if skipped else "not skipped")
    assert ("inspect some rollouts" in check.detail) is not ok
    assert len(skipped_rounds(evaluated)) == sum(reason is not None for reason in earlier)


def test_the_screen_and_the_report_tell_skipped_rounds_and_count_them(tmp_path: Path) -> None:
    records = [record(1, "<no> contrast"), record(2, None), record(3, "all timed out")]
    out = io.StringIO()
    with Screen(Console(file=out, width=200), "run") as screen:
        for each in records:
            screen.record(each)
    assert "round 1: skipped, 8 rollouts (0 failed), reward 0.500: <no> contrast" in out.getvalue()
    assert out.getvalue().count("skipped") == 2
    run = RunFolder(tmp_path)
    for each in records:
        run.append(each)
    page = write_report(run, "run", []).read_text()
    assert "2 of 3</td>" in page
    assert "&lt;no&gt; contrast" in page
    rows = list(csv.DictReader((tmp_path / "rounds.csv").open()))
    assert [row["skipped"] for row in rows] == ["<no> contrast", "", "all timed out"]


def test_a_terminal_shows_a_skipped_round_in_its_table() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, force_terminal=True, width=150, color_system=None), "run") as screen:
        screen.record(record(1, "no contrast"))
    assert "skipped" in out.getvalue()
