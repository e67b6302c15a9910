"""The rows to which the evidence of a check leads."""

import json
import time
from html import unescape
from pathlib import Path
from typing import Any

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from trainspan_schemas.config.settings import Settings
from trainspan_viewer.html.document import Page, served
from trainspan_viewer.pages.run.stage import _evidence
from trainspan_viewer.queries.check import load_stage
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import ViewerPaths
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader


def test_the_linked_rows_are_those_that_the_check_counted(bench: Bench, tmp_path: Path) -> None:
    """A round and the validation after it have the same number; a rollout was tried twice."""
    second, held_out = bench.rollout("a", attempt=1), bench.rollout("v", split="val")
    bench.send(chain(bench.rollout("a"), 2).reward(0.0), chain(second, 3).reward(1.0), chain(held_out, 4).reward(1.0))
    names = ("every call is stored", "no acknowledged span is missing", "rewards are those of the runner")
    checks = [{"name": name, "ok": True, "detail": "fine"} for name in names]
    about = {"round": second.round, "policy_version": 0, "checks": checks}
    run = tmp_path / bench.run_id
    run.mkdir()
    (run / "run.json").write_text("{}")
    of_round: dict[str, Any] = {"kind": "round", "rollout": {}, "dataset": {}, "train": {}, "seconds": {}}
    records = [{**of_round, **about}, {"kind": "eval", "name": "validation", "status": {}, **about}]
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    store = str(bench.collectors[0].store)
    sources = Sources(ViewerPaths(tmp_path, tmp_path), StoreReader(store), Settings())
    found = {}
    deadline = time.monotonic() + 60
    while sources.store.select("SELECT 1").is_behind:
        assert time.monotonic() < deadline
    for place in (0, 1):
        model = load_stage(sources, Params("/x", {"run": bench.run_id, "index": str(place)}, {}))
        for check in model.checks:
            found[check.name, place] = len(sources.store.select(check.query).rows)
            assert f'trainspan sql "{check.query.splitlines()[0]}' in unescape(served(Page("", [_evidence(check)])))
    sources.store.close()
    assert [found[name, 0] for name in names] == [5, 2, 2]
    assert [found[name, 1] for name in names] == [4, 1, 1]


def test_a_validation_and_a_probe_after_the_same_round_lead_to_their_own_rows(bench: Bench, tmp_path: Path) -> None:
    easy, hard = (bench.rollout(name, task=f"{name}'s", split="val") for name in ("easy", "hard"))
    bench.send(chain(easy, 2).reward(1.0), chain(hard, 3).reward(0.0))
    checks = [
        {"name": name, "ok": True, "detail": "fine"}
        for name in ("every call is stored", "rewards are those of the runner")
    ]
    names = ("validation", "probe")
    run = tmp_path / bench.run_id
    (run / "tasks").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    about = {"kind": "eval", "round": easy.round, "policy_version": 0, "status": {}, "tasks": 1, "checks": checks}
    records = [{"name": name, **about} for name in names]
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, task in zip(names, (easy.task, hard.task), strict=True):
        (run / "tasks" / f"{name}-{easy.round:04d}-1.jsonl").write_text(json.dumps({"id": task}) + "\n")
    store = str(bench.collectors[0].store)
    sources = Sources(ViewerPaths(tmp_path, tmp_path), StoreReader(store), Settings())
    deadline = time.monotonic() + 60
    while sources.store.select("SELECT 1").is_behind:
        assert time.monotonic() < deadline
    found = []
    for place in (0, 1):
        stage = load_stage(sources, Params("/x", {"run": bench.run_id, "index": str(place)}, {}))
        found += [len(sources.store.select(check.query).rows) for check in stage.checks]
    sources.store.close()
    assert found == [2, 1, 3, 1]
