"""What a rollback leaves to those who hold the ledger, and to a model that was withdrawn."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.training.support.sessions import Run
from trainspan_schemas.errors import CheckpointError
from trainspan_training.adoption import adopt
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry
from trainspan_training.checkpoints.swap_request import PolicyAddress


def test_whoever_holds_the_ledger_sees_what_is_appended_after_a_rollback(run: Run, tmp_path: Path, model: Any) -> None:
    """Else a follower would train a dataset again whose bytes come with another inode."""
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4))
    run()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    held = checkpoints.ledger
    CheckpointLedger(checkpoints.root).append(LedgerEntry("withdrawn", "d" * 64, "policy-000001", "put back"))
    checkpoints.reload()
    checkpoints.ledger.append(LedgerEntry("skipped", "e" * 64, None, "no rows"))
    assert held.is_withdrawn("policy-000001")
    assert held.of_dataset("e" * 64) is not None
    checkpoints.close()


def test_a_model_that_was_withdrawn_is_not_adopted_again_as_if_it_served(run: Run, tmp_path: Path, model: Any) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4))
    run()
    root = tmp_path / "checkpoints"
    shutil.copytree(root / "policy-000001", tmp_path / "model")
    assert adopt(tmp_path / "model", root, PolicyAddress("none"), retry_for_s=1) == 1
    CheckpointLedger(root).append(LedgerEntry("withdrawn", None, "policy-000001", "put back"))
    with pytest.raises(CheckpointError, match=r"is version 1 in .*, which was withdrawn: `trainspan swap 1`"):
        adopt(tmp_path / "model", root, PolicyAddress("none"), retry_for_s=1)
