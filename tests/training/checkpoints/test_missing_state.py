"""What a kill forestalled or a rollback finds deleted: Adam's state, and the record of a round."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.support.sessions import GENTLE, follow, same_weights, write
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_training.checkpoints.rollback import roll_back
from trainspan_training.checkpoints.swap_request import PolicyAddress
from trainspan_training.metrics.round_record import has_record
from trainspan_training.objective.schedule import Schedule
from trainspan_training.rounds.result import RoundResult

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.ci]


def test_a_trainer_killed_after_the_first_version_continues_with_the_same_state(
    tmp_path: Path, model: Any, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Adam's state of version 1 is made again from the kept start, which has none."""
    write(tmp_path, model, 0, 1)
    root = tmp_path / "checkpoints"
    follow(tmp_path, model_dir, 2, checkpoints="reference", keep_start=True)
    follow(tmp_path, model_dir, 1, keep_start=True)
    (state,) = root.glob("**/policy-000001/part-*.safetensors")
    state.unlink()
    caplog.clear()
    follow(tmp_path, model_dir, 1, keep_start=True)
    assert "repeating its steps from policy-000000" in caplog.text
    assert "Adam starts from zero" not in caplog.text
    assert same_weights(root / "policy-000002", tmp_path / "reference" / "policy-000002")


@pytest.mark.parametrize("can_repeat", [True, False])
def test_a_round_whose_record_a_kill_forestalled_is_recorded_or_reported_without_figures(
    tmp_path: Path, model: Any, model_dir: Path, can_repeat: bool
) -> None:
    write(tmp_path, model, 0, 1, 2)
    root = tmp_path / "checkpoints"
    follow(tmp_path, model_dir, 2)
    (state,) = root.glob("**/policy-000002/part-*.safetensors")
    state.unlink()
    lines = (root / "metrics.jsonl").read_text().splitlines()
    (root / "metrics.jsonl").write_text(lines[0] + "\n")
    results = follow(tmp_path, model_dir, 1, **({} if can_repeat else {"epsilon": 1e-4, "learning_rate": 1e-3}))
    recovered = [(result.round, result.checkpoint) for result in results if result.recovered]
    assert recovered == ([] if can_repeat else [(1, "policy-000002")])
    assert [result.version for result in results if not result.recovered] == [3]
    assert has_record(root, "policy-000002") == can_repeat


def test_adam_that_starts_from_zero_warms_up_again(tmp_path: Path, model: Any, model_dir: Path) -> None:
    """The state of version 1 is no longer kept when it is put back; that of version 3 was rebuilt after a kill."""
    write(tmp_path, model, *range(7))
    root = tmp_path / "checkpoints"
    changes: dict[str, Any] = {"warmup_rounds": 4}
    follow(tmp_path, model_dir, 3, **changes)
    (state,) = root.glob("**/policy-000003/part-*.safetensors")
    state.unlink()

    def after(result: RoundResult) -> None:
        if result.version == 4:
            roll_back(root, 1, PolicyAddress("none"), retry_for_s=1)

    results = [*follow(tmp_path, model_dir, 3, after=after, **changes), *follow(tmp_path, model_dir, 1, **changes)]
    schedule = Schedule(GENTLE.learning_rate or 0.0, 4)
    for before, result in zip((3, 0, 1, 2), results, strict=True):
        assert result.record is not None
        assert result.record.learning_rate == pytest.approx(schedule.at(before + 1 - 0.5 / result.record.steps))
    names = [f"policy-{version:06d}" for version in (3, 4, 5, 6, 7)]
    assert [CheckpointMeta.read(root / name).adam_rounds for name in names] == [3, 4, 1, 2, 3]
