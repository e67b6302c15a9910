"""The queue of what is worth labeling: which rollouts it looks at, and which pairs it has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import RunningCollector
from tests.processing.support.traces import TestRollout, chain
from trainspan_viewer.queries.labels import queue
from trainspan_viewer.queries.labels.queue import _ROLLOUTS, _items, _rollouts
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.store import StoreReader


def row(name: str, reward: float | None, status: str) -> dict[str, Any]:
    return dict(zip(_ROLLOUTS, (name, 0, "task", "run", 0, status, reward, 0), strict=True))


def test_a_pair_of_equal_rewards_is_of_rollouts_with_a_reward() -> None:
    def pairs(*rewards: float | None) -> list[tuple[str, list[tuple[str, int]]]]:
        rows = [
            row(f"r{number}", reward, "agent_error" if reward is None else "ok")
            for number, reward in enumerate(rewards)
        ]
        return [(item.detail, list(item.rollouts)) for item in _items(rows, {}, ())]

    assert pairs(None, None, None, 1.0) == []
    assert pairs(None, 1.0, None, 1.0, 1.0) == [("all 3 have 1", [("r1", 0), ("r3", 0)])]
    assert pairs(1.0, 0.0, None) == []


@pytest.fixture
def two_stores(tmp_path: Path) -> Iterator[StoreReader]:
    """Three old rollouts in the first, three new ones in the second; two spans each."""
    running = [RunningCollector(tmp_path / name) for name in "ab"]
    try:
        for name, begins, collector in zip(("old", "new"), (0.0, 1000.0), running, strict=True):
            rollouts = (TestRollout(f"{name}-{number}", begins=begins + number) for number in range(3))
            collector.wait().send([chain(rollout, 1).reward(0.5) for rollout in rollouts])
        store = StoreReader(*(str(collector.store) for collector in running))
        while store.select("SELECT 1").is_behind:  # a page does not wait for what is not loaded yet
            pass
        yield store
    finally:
        for collector in running:
            collector.stop()


@pytest.mark.ci
def test_the_newest_rollouts_of_all_stores_are_looked_at(
    two_stores: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = ["new-2", "new-1", "new-0", "old-2"]
    monkeypatch.setattr(queue, "_NEWEST_ROWS", 10)
    for query, most in (({}, 2), ({}, 4), ({"run": ["run"]}, 4)):
        monkeypatch.setattr(queue, "_MOST", most)
        rows, is_cut = _rollouts(two_stores, Params("/labels", {}, query))
        assert ([row["rollout_id"] for row in rows], is_cut) == (newest[:most], True)
