"""`trainspan dataset` over a whole store: all runs, calls without a rollout, and no running collector."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import RunningCollector
from tests.processing.support.traces import TestRollout, chain


def _dataset(store: Path, home: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "trainspan_cli", "dataset", "--store", str(store), "--format", "json"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "TRAINSPAN_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    manifest: dict[str, Any] = json.loads(done.stdout)
    return manifest


def _pair(names: str) -> list[TestRollout]:
    return [chain(TestRollout(name, task=names, run=f"run-{names}"), 1).reward(float(name == "a")) for name in names]


def _without_identity() -> TestRollout:
    """Two calls without identity, and a canary."""
    rollout = TestRollout("nobody", status=None)
    rollout.call(0, [1], [2])
    rollout.call(1, [1], [2])
    rollout.call(2, [1], [2], trainspan__call__internal=True)
    for span in rollout.spans:
        for key in rollout.identity():
            del span.attributes[key]
    return rollout


@pytest.mark.ci
def test_each_call_of_no_rollout_is_counted_once_and_a_stopped_store_is_opened_for_the_command(tmp_path: Path) -> None:
    collector = RunningCollector(tmp_path).wait()
    try:
        of_nobody = TestRollout("gone", status=None).log_reward(1.0, at=1.0)
        collector.send([*_pair("ab"), _without_identity(), of_nobody])
        first = _dataset(collector.store, tmp_path)
        assert first["dropped"] == {"no_rollout": 2, "internal": 1}
        assert (first["run_id"], first["rows"]) == ("run-ab", 2)
        collector.send([chain(TestRollout(name, task="cd"), 1).reward(float(name == "c")) for name in "cd"])
    finally:
        collector.stop()
    second = _dataset(collector.store, tmp_path)
    assert second["path"] == str(tmp_path / "dataset" / "round-0001")
    assert (second["rows"], second["calls_seen"], second["dropped"]) == (2, 2, {})
    assert (first["rewards_unmatched"], second["rewards_unmatched"]) == (1, 1)
