"""The numbers on the pages that compare: two datasets, and several runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainspan_processing.dataset.diff import Difference, ItemChange, Overlap, ValueChanges
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.intervals import RewardEstimate
from trainspan_viewer.html.elements import Child, Element
from trainspan_viewer.pages.difference import difference_body
from trainspan_viewer.pages.run.compare import render_compare
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import ViewerPaths
from trainspan_viewer.queries.run import load_compare
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader


def _tables(body: Sequence[Child]) -> list[list[list[str]]]:
    """The cells of each table, row by row, without its head."""
    tables = [table for item in body if isinstance(item, Element) for table in item.iter("table")]
    rows = [[list(row) for row in table.iter("tr")] for table in tables]
    return [[["".join(cell.itertext()) for cell in row] for row in some if row[-1].tag == "td"] for some in rows]


def _texts(body: Sequence[Child]) -> list[str]:
    return ["".join(item.itertext()) for item in body if isinstance(item, Element) and item.tag == "p"]


NOTHING = ValueChanges(0, 0, None, None, None, None, 0, None, [])
EQUAL = Difference([], Overlap(0, 0, 3, {}, {}), Overlap(0, 0, 7, {}, {}), NOTHING, NOTHING, {}, False)


def test_equal_datasets_have_no_difference() -> None:
    assert _texts(difference_body(EQUAL, "one", "two")) == ["No difference: 7 rows of 3 rollouts."]


def test_the_difference_of_two_datasets_shows_each_figure_in_its_place() -> None:
    difference = Difference(
        settings=[ItemChange("baseline", "grpo", None)],
        rollouts=Overlap(1, 2, 3, {"no_reward": 1}, {"not seen": 2}),
        rows=Overlap(4, 5, 6, {}, {}),
        rewards=ValueChanges(3, 2, 0.1, 0.2, 0.3, 0.4, 1, 0.5, [ItemChange("r/0", 0.0, 1.0)]),
        advantages=ValueChanges(6, 5, 0.6, 0.7, 0.8, 0.9, 2, None, [ItemChange("c/0", -1.5, 0.25)]),
        columns={"prompt_ids": 4, "agent": 1},
        order_differs=True,
    )
    body = difference_body(difference, "one", "two")
    settings, overlaps, values, advantages, rewards = _tables(body)
    assert settings == [["baseline", "grpo", "–"]]
    assert overlaps == [
        ["rollouts", "1", "2", "3"],
        ["in B: no_reward", "1", "", ""],
        ["in A: not seen", "", "2", ""],
        ["rows", "4", "5", "6"],
    ]
    assert values == [
        ["changed", "2 of 3", "5 of 6"],
        ["mean A", "0.1", "0.6"],
        ["mean B", "0.2", "0.7"],
        ["mean |B − A|", "0.3", "0.8"],
        ["largest |B − A|", "0.4", "0.9"],
        ["sign changed", "1", "2"],
        ["correlation", "0.5", "–"],
    ]
    assert (advantages, rewards) == ([["c/0", "-1.5", "0.25"]], [["r/0", "0", "1"]])
    assert _texts(body) == [
        "A is one, B is two.",
        "Other columns that differ in common rows: prompt_ids (4), agent (1).",
        "The common rows are in a different order.",
    ]


def _write_run(runs: Path, name: str, rate: float, rewards: Sequence[float], *, alarms: int = 0) -> None:
    folder = runs / name
    (folder / "checkpoints").mkdir(parents=True)
    settings: dict[str, Any] = {"train": {"learning_rate": rate, "seed": 3}, "loop": {"rounds": 2}}
    (folder / "run.json").write_text(json.dumps({"status": "finished", "settings": settings}))
    checks = [{"name": f"check {number}", "ok": number >= alarms, "detail": ""} for number in range(2)]
    shared = {"policy_version": 1, "checks": [], "status": {"ok": 4}, "seconds": 1.0}
    estimate = RewardEstimate.of([[reward] for reward in rewards]).record()
    lines = [
        {"kind": "eval", "name": "validation", "round": 0, "tasks": 4, **shared, **estimate},
        {
            "kind": "round",
            "round": 1,
            "policy_version": 1,
            "rollout": {"total": 8, "mean_reward": 0.5},
            "dataset": {},
            "train": {},
            "seconds": {"total": 60.0},
            "checks": checks,
        },
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = {"round": 1, "version": 1, "policy_versions": [0, 0], "k3": 0.125, "entropy": None, "error": None}
    (folder / "checkpoints" / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")


def test_runs_are_compared_by_their_figures_and_by_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    _write_run(runs, "a", 1e-5, [1.0, 1.0, 0.0, 0.0])
    _write_run(runs, "b", 2e-5, [1.0, 0.0, 0.0, 0.0], alarms=1)
    sources = Sources(ViewerPaths(runs, tmp_path / "dataset"), StoreReader("none"), Settings())
    page = render_compare(load_compare(sources, Params("/compare", {}, {"run": ["a", "b"]})))
    table, settings = _tables(page.body)
    first, second = (RewardEstimate.of([[1.0]] * n + [[0.0]] * (4 - n)) for n in (2, 1))
    assert table == [["", "a", "finished", "1", str(first), "0"], ["", "b", "finished", "1", str(second), "1"]]
    assert settings == [["[train] learning_rate", "1e-05", "2e-05"]]
    svgs = [item for child in page.body if isinstance(child, Element) for item in child.iter("svg")]
    shown = ["".join(svg.itertext()) for svg in svgs]
    assert (page.title, page.live, len(shown)) == ("2 runs", None, 3), (
        "validations, rewards and the one metric with values"
    )
    assert all(text in shown[2] for text in ("0.125", "a", "b"))
