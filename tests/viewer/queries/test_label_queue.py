"""The queue of what is worth labeling: which pairs it has."""

from typing import Any

from trainspan_viewer.queries.labels.queue import _ROLLOUTS, _items


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
