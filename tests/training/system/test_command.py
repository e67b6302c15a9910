"""`trainspan train` as a process: its output, its exit, and what a kill leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.training.support.processes.forks import forked
from tests.training.support.swap_server import policy_server
from trainspan_cli.main import run
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, digest_of_model
from trainspan_schemas.command_events import Ready, RoundTrained, TrainingProgress, parse


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainspan_cli", "train", *arguments]


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"TRAINSPAN_HOME": str(home), "OMP_NUM_THREADS": "1"}


def trainspan_train(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.ci
def test_one_round_prints_json_lines_and_nothing_else(tmp_path: Path, model: Any, model_dir: Path) -> None:
    calls = sample_rollouts(model, rollouts=4)
    write_dataset(tmp_path / "dataset", calls, round_=7, base=digest_of_model(model_dir))
    options = ("--model", str(model_dir), "--policy-url", "none", "--learning-rate", "1e-5", "--format", "json")
    done = trainspan_train(tmp_path, *options)
    assert (done.returncode, done.stderr) == (0, "")
    ready, *progress, event = map(parse, done.stdout.splitlines())
    shown = [(one.round, one.stage, one.step, one.steps) for one in progress if isinstance(one, TrainingProgress)]
    steps = [(7, None, 0, 1), (7, None, 1, 1)]
    before, after = ("replay", "read", "plan", "canary", "old", "state"), ("signal", "check", "save", "swap")
    assert shown == [*((7, name, 0, 0) for name in before), *steps, *((7, name, 0, 0) for name in after)]
    assert ready == Ready(device="the CPU", dtype="float32")
    assert isinstance(event, RoundTrained)
    assert (event.round, event.version) == (7, 1)
    assert (tmp_path / "checkpoints/latest").read_text() == "policy-000001\n"
    again = trainspan_train(tmp_path, *options)
    assert again.returncode == 1
    assert again.stderr.startswith("trainspan: all 1 datasets in ")
    assert again.stderr.count("\n") == 1


def test_a_round_that_goes_wrong_exits_1_with_one_line(
    tmp_path: Path, model: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4), round_=0)
    options = ["train", "--model", str(model_dir), "--policy-url", "none", "--learning-rate", "0.1"]
    assert run(options) == 1
    captured = capsys.readouterr()
    *stages, outcome = captured.out.splitlines()
    assert stages == [
        "training on the CPU in float32",
        "round 0: getting the log-probabilities of the old policy",
        "round 0: step 1 of 1",
    ]
    assert outcome.startswith("round 0: the KL divergence from the sampling policy is ")
    assert outcome.endswith("; policy 0 stays")
    assert captured.err.startswith("trainspan: the KL divergence from the sampling policy is ")


def test_a_job_that_cannot_be_done_ends_before_torch_is_imported(tmp_path: Path, model_dir: Path) -> None:
    write_dataset(tmp_path / "dataset", [], round_=5)
    program = (
        "import sys; from trainspan_cli.main import run; code = run(sys.argv[1:]); "
        "sys.exit(3 if {'torch', 'numpy', 'matplotlib'} & set(sys.modules) else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "--model", str(model_dir), "--format", "json"],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "trainspan: the dataset has no rows\n")
    event = json.loads(done.stdout)
    assert (event["round"], event["version"], event["skipped"]) == (5, 0, "the dataset has no rows")


def test_a_trainer_that_is_killed_trains_each_dataset_once(tmp_path: Path, model: Any, model_dir: Path) -> None:
    """Killed during a round, once it has reported the previous one; its successor is stopped when all is done."""
    for round_ in range(3):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=12, seed=round_), round_=round_)
    options = ("--model", str(model_dir), "--policy-url", "none", "--learning-rate", "1e-6", "--format", "json")
    printed: list[list[dict[str, Any]]] = []
    for stop, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 0)):
        last = 0 if stop is signal.SIGKILL else 2
        with forked(tmp_path, "trainspan_cli", "train", *options, "--follow", TRAINSPAN_HOME=str(tmp_path)) as trainer:
            until = time.monotonic() + 240
            while not any((event["event"], event.get("round")) == ("round", last) for event in trainer.events()):
                assert trainer.process.is_alive(), trainer.err.read_text()
                assert time.monotonic() < until
                time.sleep(0.01)
            printed.append([event for event in trainer.events() if event["event"] != "round_progress"])
            assert trainer.process.pid
            os.kill(trainer.process.pid, stop)
            assert trainer.wait(60).code == code
    assert [event["event"] for event in printed[0]] == ["ready", "round"]
    assert [event["event"] for event in printed[1]] in (["ready", "round", "round"], ["ready", "round"])
    metas = [CheckpointMeta.read(tmp_path / f"checkpoints/policy-{version:06d}") for version in (1, 2, 3)]
    assert len({meta.dataset_sha256 for meta in metas}) == 3
    assert [meta.parent for meta in metas] == [str(model_dir), "policy-000001", "policy-000002"]
    assert (tmp_path / "checkpoints/latest").read_text() == "policy-000003\n"


@pytest.mark.ci
def test_each_policy_is_trained_from_its_own_datasets_into_its_own_checkpoints(
    tmp_path: Path, model: Any, model_dir: Path
) -> None:
    """With its own learning rate and rank; the swap request names it, and another policy's dataset is refused."""
    (tmp_path / "trainspan.toml").write_text(
        '[model]\nadapter = "lora"\nlora_rank = 4\n[train]\nlearning_rate = 1e-5\nwarmup_rounds = 0\n'
        "[policies.writer]\nlearning_rate = 2e-5\nlora_rank = 2\n[policies.rewriter]\n"
    )
    base = digest_of_model(model_dir)
    for round_, policy in ((1, "writer"), (2, "rewriter")):
        calls = sample_rollouts(model, rollouts=4, seed=round_)
        write_dataset(tmp_path / "dataset" / policy, calls, round_=round_, base=base, policy=policy)
    write_dataset(tmp_path / "wrong", sample_rollouts(model, rollouts=4), round_=3, base=base, policy="rewriter")
    answer = {"version": 1, "canary": {"status": "fresh"}}
    with policy_server((200, answer)) as server:
        server.state = {"policies": {"writer": {"checkpoint": "policy-000001"}}, "base": "base", "dtype": "float32"}
        options = ("--model", str(model_dir), "--policy-url", server.url, "--format", "json")
        trained: dict[str, str | None] = {}
        for policy, rate, rank in (("writer", 2e-5, 2), ("rewriter", 1e-5, 4)):
            done = trainspan_train(tmp_path, *options, "--policy", policy)
            assert done.returncode == 0, done.stderr
            event = json.loads(done.stdout.splitlines()[-1])
            assert (event["version"], event["learning_rate"]) == (1, rate)
            folder = tmp_path / "checkpoints" / policy / "policy-000001"
            meta = CheckpointMeta.read(folder)
            assert meta.policy == policy
            trained[policy] = meta.weights_sha256
            assert json.loads((folder / "adapter_config.json").read_text())["r"] == rank
    assert [body for _, _, body in server.asked] == [
        {"policy": policy, "checkpoint": "policy-000001", "version": 1, "weights_sha256": weights}
        for policy, weights in trained.items()
    ]
    assert not (tmp_path / "checkpoints" / "latest").exists()
    wrong = trainspan_train(tmp_path, *options, "--policy", "writer", "--dataset", str(tmp_path / "wrong/round-0003"))
    assert wrong.returncode == 1
    assert "has calls of policy 'rewriter'" in wrong.stderr
