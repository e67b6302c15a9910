"""Runs and datasets whose files are damaged."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.artifacts.run_files import TRAINING_FILE, RunFiles
from trainspan_schemas.command_events import TrainingProgress
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.files.locks import open_locked
from trainspan_viewer.html.document import served, standalone
from trainspan_viewer.pages.dataset import render_datasets
from trainspan_viewer.pages.run.report import render_report
from trainspan_viewer.pages.run.run import render_run
from trainspan_viewer.pages.runs import render_runs
from trainspan_viewer.queries.datasets.listing import load_datasets
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import ViewerPaths
from trainspan_viewer.queries.run import load_run
from trainspan_viewer.queries.runs import RunError, load_runs, read_run
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader

FINE = {
    "kind": "eval",
    "name": "validation",
    "round": 0,
    "policy_version": 0,
    "status": {"ok": 1},
    "checks": [],
    "n": 1,
    "mean": 1.0,
    "deviation": None,
}


def test_a_damaged_run_or_dataset_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    lines = {
        "1-fine": json.dumps({**FINE, "binary": True}),
        "2-half": "",
        "3-bare": '{"kind": "eval", "name": "validation", "round": 0}',
        "4-list": "[]",
        "5-bytes": json.dumps({**FINE, "binary": True}) + "\n\udcff",
    }
    for name, text in lines.items():
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"status": ' if name == "2-half" else '{"status": "finished"}')
        (folder / "rounds.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "runs" / "6-lock" / "lock").mkdir(parents=True)
    (tmp_path / "runs" / "6-lock" / "run.json").write_text('{"status": "finished"}')
    (tmp_path / "runs" / "7-file").mkdir()
    (tmp_path / "runs" / "7-file" / "run.json").write_text("{}")
    (tmp_path / "runs" / "7-file" / "checkpoints").write_text("")
    (tmp_path / "runs" / "8-array").mkdir()
    (tmp_path / "runs" / "8-array" / "run.json").write_text("[]")
    for name, manifest in (("round-0001", '{"version": 999}'), ("round-0002", "null")):
        dataset = tmp_path / "dataset" / name
        dataset.mkdir(parents=True)
        manifest_path(dataset).parent.mkdir()
        manifest_path(dataset).write_text(manifest)
    sources = Sources(ViewerPaths(tmp_path / "runs", tmp_path / "dataset"), StoreReader("none"), Settings())
    params = Params("/", {}, {})
    model = load_runs(sources, params)
    assert [run.run_id for run in model.runs if run.error] == ["8-array", "7-file", "4-list", "3-bare", "2-half"]
    assert all(run.error.startswith("cannot be read") for run in model.runs if run.error)
    assert [len(run.validations) for run in model.runs if not run.error] == [0, 1, 1]
    assert render_runs(model).body
    for run in model.runs:
        page = Params(f"/runs/{run.run_id}", {"run": run.run_id}, {})
        if run.error:
            with pytest.raises(RunError, match="cannot be read"):
                load_run(sources, page)
        else:
            assert render_run(load_run(sources, page)).body
    datasets = load_datasets(sources, params)
    assert [row.location.name for row in datasets.datasets if "cannot be read" in row.error] == [
        "round-0002",
        "round-0001",
    ]
    assert render_datasets(datasets).live is None


def test_records_are_kept_for_few_runs_only(tmp_path: Path) -> None:
    import gc

    from trainspan_viewer.queries.runs import RunRecords

    for number in range(30):
        (tmp_path / f"r{number:02d}").mkdir()
        (tmp_path / f"r{number:02d}" / "run.json").write_text("{}")
    places = ViewerPaths(tmp_path, tmp_path)
    load_runs(Sources(places, StoreReader("none"), Settings()), Params("/", {}, {}))
    for run in places.all_runs():
        read_run(run)
    gc.collect()
    assert sum(isinstance(one, RunRecords) for one in gc.get_objects()) <= 8


def test_the_page_of_a_run_shows_how_far_its_training_is_while_the_loop_lives(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_text('{"status": "running"}')
    step = TrainingProgress(3, step=2, steps=8, forwarded_tokens=1200, seconds=3.0)
    (tmp_path / "one" / TRAINING_FILE).write_text(json.dumps(dataclasses.asdict(step)))
    sources = Sources(ViewerPaths(tmp_path, tmp_path), StoreReader("none"), Settings())
    shown = "round 3: step 2 of 8, 400 tokens/s, about 18 s left"
    for is_running in (True, False):
        lock = open_locked(tmp_path / "one" / "lock") if is_running else None
        page = served(render_run(load_run(sources, Params("/runs/one", {"run": "one"}, {}))), "1")
        assert (shown in page) is is_running
        if lock is not None:
            os.close(lock)


def test_settings_of_a_run_are_compared_with_the_defaults_as_they_are_stored(tmp_path: Path) -> None:
    settings = dataclasses.asdict(Settings())
    settings["loop"]["rounds"] += 1
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_text(json.dumps({"settings": settings}, default=str))
    sources = Sources(ViewerPaths(tmp_path, tmp_path), StoreReader("none"), Settings())
    model = load_run(sources, Params("/runs/one", {"run": "one"}, {}))
    assert [(row.section, row.name) for row in model.settings if not row.is_default] == [("loop", "rounds")]
    assert len(model.settings) > 100


def test_every_check_of_a_long_run_is_on_one_page_and_each_alarm_leads_to_its_record(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    (folder / "run.json").write_text('{"status": "finished"}')
    checks = [[{"name": "swap", "ok": place not in (3, 260), "detail": f"<i>{place}"}] for place in range(300)]
    lines = [{**FINE, "binary": True, "round": place, "checks": one} for place, one in enumerate(checks)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sources = Sources(ViewerPaths(tmp_path, tmp_path), StoreReader("none"), Settings())

    def page(**query: str) -> tuple[list[int], str]:
        model = load_run(sources, Params("/runs/long", {"run": "long"}, {name: [one] for name, one in query.items()}))
        return [stage.index for stage in model.stages], served(render_run(model))

    newest, text = page()
    assert newest == list(range(180, 300))
    shown: list[int] = []
    for start in ("0", "120", "240"):
        shown += page(checks_from=start)[0]
    assert shown == list(range(300))
    assert "checks_from=60" in text
    assert text.index("/runs/long/records/260") < text.index('/runs/long/records/3"')
    report = standalone(render_report(read_run(RunFiles(folder)), "t", []))
    assert "round 3: swap" in report
    assert "&lt;i&gt;260" in report
