"""How a trainer that follows a folder finds the datasets in it."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.dataset_files import LoggedCall, write_dataset
from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_training import dataset_queue
from trainspan_training.checkpoints.ledger import CheckpointLedger

CALL = LoggedCall("a", [1, 2], [3], [-0.5], 1.0)


def find(root: Path, idle: Callable[[int], None] = lambda _: None) -> int:
    """The round of the first dataset that is found; calls `idle` with the number of each poll."""
    polls = 0

    def count() -> None:
        nonlocal polls
        polls += 1
        assert polls < 500, "it is not found"
        idle(polls)

    return next(dataset_queue.follow(root, CheckpointLedger(root.parent), count)).round


def test_a_manifest_that_cannot_be_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_queue, "RETRY_S", 0.0)
    monkeypatch.setattr(dataset_queue, "POLL_S", 0.0)
    manifest = manifest_path(write_dataset(tmp_path / "datasets", [CALL], round_=3))
    read, failures = Path.read_bytes, [OSError(errno.EIO, "Input/output error")]

    def fail_once(path: Path) -> bytes:
        if path == manifest and failures:
            raise failures.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail_once)
    assert find(tmp_path / "datasets") == 3
    assert not failures


def test_a_malformed_manifest_is_left_out_until_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("RETRY_S", "POLL_S", "RESCAN_S"):
        monkeypatch.setattr(dataset_queue, name, 0.0)
    manifest = manifest_path(write_dataset(tmp_path / "datasets", [CALL], round_=3))
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{")

    def mend(polls: int) -> None:
        if polls == 5:
            manifest.with_name("new").write_bytes(whole)
            manifest.with_name("new").replace(manifest)

    assert find(tmp_path / "datasets", mend) == 3
    assert sum("dataset=round-0003 left out: " in record.getMessage() for record in caplog.records) == 1


def test_an_idle_trainer_scans_the_folder_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_queue, "POLL_S", 0.01)
    monkeypatch.setattr(dataset_queue, "COARSE_S", 0.05)
    monkeypatch.setattr(dataset_queue, "RESCAN_S", 600.0)
    root = tmp_path / "datasets"
    root.mkdir()
    scan, scans = dataset_queue.dataset_dirs, [0]

    def counted(folder: Path) -> list[Path]:
        scans[0] += 1
        return scan(folder)

    def build(polls: int) -> None:
        if polls == 100:
            assert 0 < scans[0] < 20
            write_dataset(root, [CALL], round_=3)

    monkeypatch.setattr(dataset_queue, "dataset_dirs", counted)
    assert find(root, build) == 3


def test_datasets_are_found_one_after_the_other_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_queue, "COARSE_S", 0.0)
    for round_ in (1, 2):
        write_dataset(tmp_path / "datasets", [CALL], round_=round_)
    datasets = dataset_queue.follow(
        tmp_path / "datasets", CheckpointLedger(tmp_path), lambda: pytest.fail("one is left")
    )
    assert [next(datasets).round, next(datasets).round] == [1, 2]
