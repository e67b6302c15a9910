"""What the loop makes of the trainer's event of a round."""

import hashlib
import json
import os
import queue
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspan_loop.checks.integrity import swap_check
from trainspan_loop.processes.stages import Stages
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.command_events import RoundTrained
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ProcessError
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with the dataset of round 1."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    folder = RunFolder.create({})
    folder.checkpoints.mkdir()
    manifest = manifest_path(dataset_dir(folder.datasets, 1))
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    return folder


SHA256 = hashlib.sha256(b"{}").hexdigest()


def stages_of(folder: RunFolder, events: "queue.Queue[Any]", **services: Any) -> Stages:
    """The stages of a run whose trainer says these events."""
    others: Any = SimpleNamespace(trainer=lambda _: SimpleNamespace(events=events), **services)
    screen: Any = SimpleNamespace(policy=lambda version, policy: None)
    return Stages(Settings(), others, folder, screen)


def test_a_round_whose_dataset_would_be_trained_later_is_not_done(folder: RunFolder) -> None:
    events: queue.Queue[RoundTrained] = queue.Queue()
    stages = stages_of(folder, events)
    full = RoundTrained(1, 1, error="cannot save policy-000002: No space left on device")

    events.put(full)
    folder.metrics_file(None).write_text(json.dumps({"error": full.error, "dataset": SHA256}) + "\n")
    with pytest.raises(
        ProcessError, match=r"round 1 is not trained: cannot save policy-000002: .*; mend that, then use"
    ):
        stages.trained(1, None)

    ledger = CheckpointLedger(folder.checkpoints)
    ledger.append(LedgerEntry("trained", SHA256, "policy-000002"))
    trained = RoundTrained(1, 2)
    events.put(trained)
    assert stages.trained(1, None) == trained

    ledger.append(LedgerEntry("aborted", SHA256, reason="the loss is nan"))
    aborted = RoundTrained(1, 1, error="the loss is nan")
    events.put(aborted)
    assert stages.trained(1, None) == aborted


@pytest.mark.parametrize("has_metrics", [False, True])
def test_a_published_round_that_a_restarted_trainer_repeats_is_waited_for_and_not_skipped(
    folder: RunFolder, has_metrics: bool
) -> None:
    """However long it takes. Without metrics in the end, its version is known and its figures are not."""
    ledger = CheckpointLedger(folder.checkpoints)
    ledger.append(LedgerEntry("trained", SHA256, "policy-000002"))
    ledger.append(LedgerEntry("published", SHA256, "policy-000002"))
    long_ago = time.time() - 3600
    os.utime(folder.checkpoints / "ledger.jsonl", (long_ago, long_ago))
    events: queue.Queue[RoundTrained] = queue.Queue()
    waited = iter(range(10))

    def keep_alive() -> None:
        if next(waited) < 2:
            return
        if has_metrics:
            line = {"dataset": SHA256, "version": 2, "checkpoint": "policy-000002", "kl": 0.25}
            folder.metrics_file(None).write_text(json.dumps(line) + "\n")
        else:
            events.put(RoundTrained(1, 2, "policy-000002", recovered=True))

    served = SimpleNamespace(version=2, canary={"status": "fresh"})
    state = SimpleNamespace(of=lambda _: served)
    policy = SimpleNamespace(state=lambda: state)
    event = stages_of(folder, events, keep_alive=keep_alive, policy=policy).trained(1, None)
    assert (event.version, event.checkpoint, event.kl) == (2, "policy-000002", 0.25 if has_metrics else None)
    assert (event.skipped, event.error, event.recovered) == (None, None, True)
    assert swap_check(event).ok
