"""The policy's movement from version to version."""

import json
from pathlib import Path

import pytest

from trainspan_training.metrics.movement import Movement
from trainspan_training.metrics.round_record import METRICS_FILE


def test_movements_add_up_along_the_updates_between_two_versions(tmp_path: Path) -> None:
    lines = [
        {"version": 1, "kl": 0.02, "error": None},
        {"version": 1, "kl": 0.9, "error": "aborted: the policy before it stays"},
        {"version": 2, "kl": 0.005, "error": None},
    ]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    movement = Movement.of(tmp_path)
    assert movement.along([]) == 0
    assert movement.along([2]) == pytest.approx(0.1)
    assert movement.along([1, 2]) == pytest.approx(0.3)
    assert movement.along([1, 2, 3]) is None, "the last round is not on record"
    movement.add(3, 0.02)
    assert movement.along([1, 2, 3]) == pytest.approx(0.5)


def test_a_policy_before_the_records_has_an_unknown_movement(tmp_path: Path) -> None:
    assert Movement.of(tmp_path).along([1]) is None
