"""Runs of several policies: the datasets of each, and what the run's page shows of each."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from trainspan_schemas.config.settings import PolicySettings, Settings
from trainspan_viewer.html.document import standalone
from trainspan_viewer.pages.run.run import render_run
from trainspan_viewer.pages.run.stage import render_stage
from trainspan_viewer.queries.check import load_stage
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError, ViewerPaths
from trainspan_viewer.queries.run import load_run
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader

RUN = "20260101-000000-aaaaaaaa"


def figures(version: int, kl: float | None, skipped: str | None = None) -> dict[str, Any]:
    train = {} if kl is None else {"kl": kl, "logp_diff_mean": 1e-7, "swap": {"canary": {"status": "fresh"}}}
    dataset = {"calls_seen": 16, "calls_kept": 8 if kl else 0, "dropped": {"other_policy": 8}}
    return {
        "policy_version": version,
        "skipped": skipped,
        "dataset": dataset,
        "train": train,
        "seconds": {"train": 1.5},
    }


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """A run of two policies with one round, in which the rewriter was skipped and its check does not hold."""
    run = tmp_path / "runs" / RUN
    settings = replace(
        Settings(), policies={"writer": PolicySettings(learning_rate=3e-4), "rewriter": PolicySettings()}
    )
    checks = [
        {"name": "every call is stored", "ok": True, "detail": "16"},
        {"name": "writer: the swap is fresh", "ok": True, "detail": "version 1"},
        {"name": "rewriter: rounds train the policy", "ok": False, "detail": "skipped, 3 in a row"},
    ]
    record = {
        "kind": "round",
        "round": 1,
        "rollout": {"total": 8, "mean_reward": 0.5},
        "seconds": {"total": 9.0},
        "policy_version": None,
        "skipped": None,
        "train": {},
        "checks": checks,
        "dataset": {"calls_seen": 16, "calls_kept": 8, "dropped": {"other_policy": 8}},
        "policies": {"writer": figures(1, 0.0125), "rewriter": figures(0, None, "none of 16 calls is trainable")},
    }
    for policy in ("writer", "rewriter"):
        (run / "dataset" / policy / "round-0001").mkdir(parents=True)
        (run / "checkpoints" / policy).mkdir(parents=True)
        line = {"round": 1, "version": 1, "kl": 0.0125, "k3": 0.01, "entropy": 2.0}
        (run / "checkpoints" / policy / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run / "logs").mkdir()
    (run / "logs" / "trainer-rewriter.log").write_text("the end of the rewriter's log\n")
    (run / "run.json").write_text(json.dumps({"run_id": RUN, "status": "finished", "settings": asdict(settings)}))
    (run / "rounds.jsonl").write_text(json.dumps(record) + "\n")
    for folder in ("writer/round-0002", "round-0009", "elsewhere"):
        (tmp_path / "dataset" / folder).mkdir(parents=True)
    return Sources(ViewerPaths(tmp_path / "runs", tmp_path / "dataset"), StoreReader("none"), Settings())


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_each_policy_has_datasets_with_addresses_of_their_own(sources: Sources) -> None:
    places = sources.paths
    names = [f"{RUN}:rewriter:round-0001", f"{RUN}:writer:round-0001", "round-0009", ":writer:round-0002"]
    assert [place.name for place in places.all_datasets()] == names
    for name, policy in zip(names, ("rewriter", "writer", None, "writer"), strict=True):
        place = places.dataset(name)
        assert (place.name, place.policy, place.path.is_dir()) == (name, policy, True)
    first = places.dataset(names[0])
    assert [other.name for other in places.of_other_policies(first)] == names[1:2]
    assert places.of_other_policies(places.dataset("round-0009")) == []


@pytest.mark.parametrize(
    "name",
    [
        f"{RUN}:round-0001",
        f"{RUN}:..:round-0001",
        f"{RUN}::round-0001",
        f"{RUN}:unknown:round-0001",
        f"a:{RUN}:writer:round-0001",
        "::round-0009",
        ":../dataset:round-0009",
        "writer:round-0002",
    ],
)
def test_an_address_never_leads_elsewhere(sources: Sources, name: str) -> None:
    with pytest.raises(NotFoundError):
        sources.paths.dataset(name)


def test_the_runs_page_has_a_row_and_a_curve_for_each_policy(sources: Sources) -> None:
    page = standalone(render_run(load_run(sources, Params("/", {"run": RUN}, {}))))
    text = text_of(page)
    assert "1 writer 1 8 0 0.5 16 8 other_policy 8 0.013" in text
    assert "1 rewriter skipped 8 0 0.5 16 0 none of 16 calls is trainable" in text
    assert "writer: k3 to the sampler" in text
    assert "rewriter: entropy" in text
    assert "checks of round 1, policy writer: all hold" in page
    assert "checks of round 1, policy rewriter: some do not hold" in page
    assert "[policies.writer] learning_rate 0.0003" in text


def test_the_evidence_of_a_round_is_that_of_each_policy(sources: Sources) -> None:
    model = load_stage(sources, Params("/", {"run": RUN, "index": "0"}, {}))
    found = {check.name: check for check in model.checks}
    assert list(found) == ["rewriter: rounds train the policy", "every call is stored", "writer: the swap is fresh"]
    failed = found["rewriter: rounds train the policy"]
    assert failed.log == "the end of the rewriter's log"
    assert json.loads(failed.figures) == {"skipped": "none of 16 calls is trainable", "error": None}
    assert json.loads(found["writer: the swap is fresh"].figures) == {"canary": {"status": "fresh"}}
    text = text_of(standalone(render_stage(model)))
    assert "policy writer version 1, 8 of 16 calls trained, KL 0.013" in text
    assert "policy rewriter skipped: none of 16 calls is trainable" in text
    assert model.datasets == [f"{RUN}:rewriter:round-0001", f"{RUN}:writer:round-0001"]
