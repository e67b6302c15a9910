import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from trainspan_loop.sampling.task_feed import draws
from trainspan_loop.state import run_folder
from trainspan_loop.state.run_folder import DamagedRunError, RunFolder, newest_unfinished, runs_named
from trainspan_schemas.artifacts.checkpoint import read_latest
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.command_events import TrainingProgress
from trainspan_schemas.errors import ProcessError, UsageError
from trainspan_schemas.files.durable import sync
from trainspan_schemas.intervals import RewardEstimate


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))


def test_only_an_unfinished_run_of_the_same_settings_is_resumed() -> None:
    assert newest_unfinished({"a": 1}) is None
    folder = RunFolder.create({"a": 1, "b": [2]})
    assert newest_unfinished({"a": 1, "b": [2]}) == folder
    assert newest_unfinished({"a": 2, "b": [2]}) is None
    folder.finish("finished")
    assert newest_unfinished({"a": 1, "b": [2]}) is None


def test_a_damaged_record_of_a_run_counts_as_missing_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder.create({"a": 1})
    (folder.path / "run.json").write_bytes(b"")
    assert newest_unfinished({"a": 1}) is None
    assert f"event=run_file_damaged {folder.path / 'run.json'} is damaged" in caplog.text


def test_a_damaged_file_of_a_run_in_progress_is_refused_by_name() -> None:
    """Draws that count from 1 again would join two groups of a task."""
    folder = RunFolder.create({})
    (folder.path / "draws.json").write_bytes(b"")
    with pytest.raises(DamagedRunError, match=r"draws.json is damaged: put back a copy"):
        draws(folder)


def test_a_file_is_durable_before_it_replaces_another(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create({})
    synced = []

    def record(path: Path) -> None:
        sync(path)
        synced.append((path.name, folder.read("state.json")))

    monkeypatch.setattr(run_folder, "sync", record)
    folder.write("state.json", {"since": 1})
    assert synced == [(".state.json.tmp", {}), (folder.path.name, {"since": 1})]


def test_a_run_goes_on_at_other_addresses_and_with_other_rounds() -> None:
    begun = {"loop": {"rounds": 20, "seed": 1}, "serving": {"port": 8000}, "policies": {}}
    folder = RunFolder.create(begun)
    assert newest_unfinished({**begun, "loop": {"rounds": 3, "seed": 1}, "serving": {"port": 0}}) == folder
    assert newest_unfinished({**begun, "loop": {"rounds": 20, "seed": 2}}) is None
    folder.note_training(TrainingProgress(3, "old"))
    folder.begin_run(3)
    assert folder.read("run.json")["settings"] == {**begun, "loop": {"rounds": 3, "seed": 1}}
    assert folder.training() == {}


def test_a_run_is_resumed_and_found_by_its_name() -> None:
    named, other = RunFolder.create({"a": 1}, "kl-0.05"), RunFolder.create({"a": 1}, "kl-0")
    assert newest_unfinished({"a": 1}, "kl-0.05") == named
    assert newest_unfinished({"a": 1}, "kl") is None
    assert runs_named("kl-0") == [other]
    assert set(runs_named(None)) == {named, other}
    with pytest.raises(UsageError, match="--name 'a/b': use up to 64 letters, digits"):
        RunFolder.create({}, "a/b")


def test_the_training_in_progress_is_shown_while_the_loop_lives() -> None:
    folder = RunFolder.create({"loop": {}})
    with folder.held():
        folder.note_training(TrainingProgress(3, step=2, steps=8, forwarded_tokens=1200, seconds=3.0))
        assert str(TrainingProgress(**folder.training())) == "step 2 of 8, 400 tokens/s, about 18 s left"
    assert folder.training() == {}, "a loop that was killed trains nothing"


def test_the_rounds_that_were_begun_are_those_on_record_or_with_a_dataset() -> None:
    folder = RunFolder.create({"policies": {"a": {}, "b": {}}})
    assert folder.last_begun() == 0
    folder.append({"kind": "round", "round": 1})
    folder.append({"kind": "eval", "round": 5})
    assert folder.last_begun() == 1
    manifest = manifest_path(dataset_dir(folder.datasets / "b", 2))
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    dataset_dir(folder.datasets / "b", 2).mkdir()
    assert folder.last_begun() == 2


def test_a_record_torn_by_a_kill_is_left_out() -> None:
    folder = RunFolder.create({})
    folder.append({"round": 1})
    with (folder.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "tra')
    assert folder.records() == [{"round": 1}]
    folder.append({"round": 2})
    assert folder.records() == [{"round": 1}, {"round": 2}]


def test_what_the_trainer_did_before_a_kill_is_found_with_and_without_metrics() -> None:
    folder = RunFolder.create({})
    folder.checkpoints.mkdir()
    (folder.checkpoints / "metrics.jsonl").write_text(
        '{"dataset": "a", "version": 1}\n'
        '{"dataset": "f", "version": 1, "error": "the disk is full"}\n'
        '{"dataset": "g", "version": 1, "error": "the disk is full"}\n'
        '{"dataset": "g", "version": 2, "error": null}\n'
        '{"dataset": "h", "version": 2, "error": "the loss is nan"}\n'
        '{"dataset": "i", "version": 2, "error": "the disk is full"}\n'
        '{"dataset": "i", "version": 2, "error": "the loss is nan"}\n'
    )
    (folder.checkpoints / "ledger.jsonl").write_text(
        '{"event": "trained", "dataset": "a", "reason": null}\n'
        '{"event": "trained", "dataset": "g", "reason": null}\n'
        '{"event": "aborted", "dataset": "h", "reason": "the loss is nan"}\n'
        '{"event": "aborted", "dataset": "i", "reason": "the loss is nan"}\n'
        '{"event": "skipped", "dataset": "b", "reason": "the dataset has no rows"}\n'
        '{"event": "trained", "dataset": "c", "reason": null}\n'
        '{"event": "published", "dataset": "c", "reason": null}\n'
        '{"event": "trained", "dataset": "d", "reason": null}\n'
        '{"event": "aborted", "dataset": "e", "reason": "the loss is nan"}\n'
    )
    assert folder.trained_before("a") == {"dataset": "a", "version": 1}
    assert folder.trained_before("b") is None, "a running trainer still writes its metrics"
    long_ago = time.time() - 60
    os.utime(folder.checkpoints / "ledger.jsonl", (long_ago, long_ago))
    assert folder.trained_before("a") == {"dataset": "a", "version": 1}
    assert folder.trained_before("b") == {"skipped": "the dataset has no rows"}
    assert folder.trained_before("c") is None, (
        "a trainer that starts repeats its round, or says that its figures are lost"
    )
    assert folder.trained_before("d") is None
    assert folder.trained_before("e") == {"error": "the loss is nan"}
    assert folder.trained_before("f") is None, "it is trained again"
    assert folder.trained_before("g") == {"dataset": "g", "version": 2, "error": None}
    assert folder.trained_before("h") == {"dataset": "h", "version": 2, "error": "the loss is nan"}
    assert folder.trained_before("i") == {"dataset": "i", "version": 2, "error": "the loss is nan"}, "the last attempt"


def test_the_best_checkpoint_outlives_pruning_and_replaces_the_earlier_one() -> None:
    folder = RunFolder.create({})
    for name in ("policy-000001", "policy-000002"):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "model.safetensors").write_text(name)
        folder.keep_best({None: name}, {"round": 1, "policy_version": 1, **RewardEstimate(4, 0.75, 0.5, True).record()})
        shutil.rmtree(folder.checkpoints / name)
    assert [path.name for path in (folder.path / "best").iterdir()] == ["policy-000002"]
    kept = folder.read("run.json")["best"]
    assert Path(kept["checkpoint"], "model.safetensors").read_text() == "policy-000002"
    assert (kept["round"], RewardEstimate.of_record(kept)) == (1, RewardEstimate(4, 0.75, 0.5, True))


def test_the_run_names_its_best_checkpoint_before_the_earlier_one_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create({})

    def keep(round_: int) -> None:
        name = f"policy-{round_:06d}"
        (folder.checkpoints / name).mkdir(parents=True)
        figures = RewardEstimate(4, 0.75, 0.5, True).record()
        folder.keep_best({None: name}, {"round": round_, "policy_version": round_, **figures})

    def fail(path: Path, **_: object) -> None:
        if path.name == "policy-000001":
            raise OSError("the disk is away")

    keep(1)
    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(OSError, match="the disk is away"):
        keep(2)
    assert Path(folder.read("run.json")["best"]["checkpoint"]).name == "policy-000002"


def test_one_process_at_a_time_drives_a_run() -> None:
    folder = RunFolder.create({})
    assert not folder.is_held()
    with (folder.path / "lock").open("w") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, (reader, fcntl.LOCK_UN)).start()
        with folder.held():  # a reader that looks for an instant is waited for
            pass
    with folder.held():
        assert folder.is_held()
        with pytest.raises(ProcessError, match=f"run {folder.run_id} is in progress in another"), folder.held():
            pytest.fail("two processes hold the lock")
    assert not folder.is_held()


def test_the_best_checkpoints_of_several_policies_are_a_folder_to_serve_from() -> None:
    folder = RunFolder.create({})
    for policy, name in (("writer", "policy-000002"), ("rewriter", "policy-000001")):
        (folder.checkpoints / policy / name).mkdir(parents=True)
        (folder.checkpoints / policy / name / "adapter_model.safetensors").write_text(f"{policy} {name}")
    figures = {"policy_version": None, **RewardEstimate(4, 0.75, 0.5, True).record()}
    folder.keep_best({"writer": "policy-000002"}, {"round": 1, **figures})
    folder.keep_best({"writer": "policy-000002", "rewriter": "policy-000001"}, {"round": 2, **figures})
    best = Path(folder.read("run.json")["best"]["checkpoint"])
    assert best == folder.path / "best" / "round-0002"
    assert [path.name for path in best.parent.iterdir()] == ["round-0002"]
    for policy, name in (("writer", "policy-000002"), ("rewriter", "policy-000001")):
        latest = read_latest(best / policy)
        assert latest is not None
        assert (latest / "adapter_model.safetensors").read_text() == f"{policy} {name}"
