"""The demo with two rounds: the whole loop on real parts."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import DemoRun

pytestmark = [pytest.mark.timeout(1500), pytest.mark.ci]


def records(demo: DemoRun, kind: str) -> list[dict[str, Any]]:
    lines = (demo.folder / "rounds.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_the_demo_succeeds_and_every_check_holds(demo: DemoRun) -> None:
    assert demo.process.returncode == 0, demo.process.stderr[-3000:]
    assert "✗" not in demo.process.stderr
    for name in (
        "held-out tasks",
        "success at the start",
        "every call is stored",
        "no acknowledged span is missing",
        "ids and logprobs have equal length",
        "every drop is named",
        "rewards are those of the runner",
        "server and trainer agree",
        "the swap is fresh",
        "rounds train the policy",
    ):
        assert f"✓ {name}: " in demo.process.stderr


def test_each_round_made_a_policy_that_then_answered(demo: DemoRun) -> None:
    rounds = records(demo, "round")
    assert [record["round"] for record in rounds] == [1, 2]
    assert [record["policy_version"] for record in rounds] == [1, 2]
    weights = {
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (demo.folder / "checkpoints").glob("policy-*/model.safetensors")
    }
    assert len(weights) == 2
    evals = [(record["name"], record["policy_version"]) for record in records(demo, "eval")]
    assert evals == [("validation", 0), ("probe", 0), ("validation", 2), ("probe", 2)]
    for record in rounds:
        assert record["dataset"]["calls_kept"] > 100
        # Rollouts with a common prefix share its tokens, so fewer may be forwarded than are trained.
        assert min(record["train"][f"{kind}_tokens"] for kind in ("forwarded", "trained")) > 100


def test_the_command_that_it_ends_with_names_a_model(demo: DemoRun) -> None:
    (folder,) = re.findall(r"trainspan serve (\S+)$", demo.process.stderr, re.MULTILINE)
    assert (Path(folder) / "config.json").exists()


def test_the_report_shows_the_curves_and_loads_nothing(demo: DemoRun) -> None:
    page = (demo.folder / "report.html").read_text()
    assert "default-src 'none'" in page
    assert page.count("<svg") > 5
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:|//)""", page)
