"""What the loop makes of the trainer's event of a round."""

import hashlib
import json
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspan_loop.processes.stages import Stages
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.command_events import RoundTrained
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ProcessError
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry


def test_a_round_whose_dataset_would_be_trained_later_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    folder = RunFolder.create({})
    folder.checkpoints.mkdir()
    manifest = manifest_path(dataset_dir(folder.datasets, 1))
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()
    events: queue.Queue[RoundTrained] = queue.Queue()
    services: Any = SimpleNamespace(trainer=lambda _: SimpleNamespace(events=events))
    screen: Any = SimpleNamespace(policy=lambda version, policy: None)
    stages = Stages(Settings(), services, folder, screen)
    full = RoundTrained(1, 1, error="cannot save policy-000002: No space left on device")

    events.put(full)
    folder.metrics_file(None).write_text(json.dumps({"error": full.error, "dataset": sha256}) + "\n")
    with pytest.raises(
        ProcessError, match=r"round 1 is not trained: cannot save policy-000002: .*; mend that, then use"
    ):
        stages.trained(1, None)

    ledger = CheckpointLedger(folder.checkpoints)
    ledger.append(LedgerEntry("trained", sha256, "policy-000002"))
    trained = RoundTrained(1, 2)
    events.put(trained)
    assert stages.trained(1, None) == trained

    ledger.append(LedgerEntry("aborted", sha256, reason="the loss is nan"))
    aborted = RoundTrained(1, 1, error="the loss is nan")
    events.put(aborted)
    assert stages.trained(1, None) == aborted
