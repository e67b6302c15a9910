"""The file `metrics.jsonl`: torn lines, a full disk, and a kill before a round's line."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.training.support.sessions import GENTLE, Run
from trainspan_training.metrics import round_record
from trainspan_training.metrics.round_record import METRICS_FILE, has_record, read_records, signals
from trainspan_training.rounds.saving import PolicyFiles

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def root(tmp_path: Path, model: Any) -> Path:
    """The checkpoints of a run that has three datasets."""
    for round_ in range(3):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    return tmp_path / "checkpoints"


def versions(root: Path) -> list[int]:
    return [line["version"] for line in read_records(root)]


def kill_before_the_record(root: Path, version: int) -> None:
    """Leaves what a trainer leaves that was killed right after the swap to this version."""
    shutil.rmtree(root / f"optimizer/policy-{version:06d}")
    lines = (root / METRICS_FILE).read_text().splitlines(keepends=True)
    (root / METRICS_FILE).write_text("".join(lines[:-1]))


def test_a_torn_line_spoils_no_other(run: Run, root: Path) -> None:
    run(rounds=1)
    with (root / METRICS_FILE).open("a") as file:
        file.write('{"round": 1, "versi')
    run(rounds=1)
    assert versions(root) == [1, 2]


def test_the_tests_before_a_round_are_those_of_earlier_rounds_that_did_not_fail(tmp_path: Path) -> None:
    """A round that is repeated has a record already, whose test must not count twice, nor gate its own steps."""
    usual = {"signal_within": 1.0, "signal_between": 0.0, "error": None}
    lines = [
        {**usual, "round": 1, "signal_p": 0.1, "checkpoint": "policy-000001"},
        {**usual, "round": 2, "signal_p": 0.2, "checkpoint": "policy-000001", "error": "the loss is nan"},
        {**usual, "round": 3, "signal_p": None, "checkpoint": "policy-000002"},
        {**usual, "round": 4, "signal_p": 0.4, "checkpoint": "policy-000003"},
    ]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [signal.p for signal in signals(tmp_path, 4)] == [0.1]
    assert [signal.p for signal in signals(tmp_path, 5)] == [0.1, 0.4]
    assert has_record(tmp_path, "policy-000003")
    (tmp_path / METRICS_FILE).write_text(json.dumps(lines[1]) + "\n")
    assert not has_record(tmp_path, "policy-000001"), "it is the checkpoint before a round that failed"


@pytest.mark.ci
def test_a_round_counts_if_its_record_cannot_be_written(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(round_record, "append_record", fail)
        first, second = run(rounds=2)
    assert (first.version, second.version, first.error, second.error) == (1, 2, None, None)
    assert "round=0 cannot be recorded: No space left on device" in caplog.text
    run(rounds=1)
    assert versions(root) == [3]


@pytest.mark.ci
def test_a_record_that_a_kill_forestalled_is_that_of_the_repeated_steps(run: Run, root: Path) -> None:
    run(rounds=1)
    (before,) = read_records(root)
    kill_before_the_record(root, 1)
    run(rounds=1)
    assert versions(root) == [1, 2]
    again = read_records(root)[0]
    timed = {"seconds", "tokens_per_second", "agreement"}  # it names the server's dtype, which nobody asked for
    assert {key: value for key, value in again.items() if key not in timed} == {
        key: value for key, value in before.items() if key not in timed
    }
    assert again["agreement"]["mean"] == before["agreement"]["mean"]
    shutil.rmtree(root / "optimizer/policy-000002")
    run(rounds=1)
    assert versions(root) == [1, 2, 3], "a record that is there is not written twice"


def test_steps_that_give_other_weights_are_not_recorded_for_them(run: Run, root: Path) -> None:
    run(rounds=1)
    kill_before_the_record(root, 1)
    run(dataclasses.replace(GENTLE, learning_rate=2e-5), rounds=1)
    assert versions(root) == [2]


def test_a_round_is_recorded_before_its_state_is_complete(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint with a state is not repeated, and would stay without a record."""
    recorded: list[bool] = []
    monkeypatch.setattr(PolicyFiles, "keep_state", lambda _: recorded.append(has_record(root, "policy-000001")))
    run(rounds=1)
    assert recorded == [True]
