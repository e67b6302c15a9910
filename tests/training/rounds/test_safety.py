"""Failing rounds: a limit exceeded, a disk that fills, a kill at any moment. The previous policy is kept."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.support.places import ROOT
from tests.training.support.exactness.references import mixed_rollouts, one_step
from tests.training.support.processes.forks import run_forked
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.checkpoints.swap_request import Swap
from trainspan_training.rounds.result import RoundResult


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_kl": 0.01}, "the KL divergence from the old policy is "),
        ({"max_ratio": 1.5, "max_kl": 1e9}, "an importance ratio is "),
    ],
)
def test_a_step_beyond_a_limit_moves_no_weight(
    make_trainer: Callable[..., Any], model: Any, limits: dict[str, float], reason: str
) -> None:
    trainer = make_trainer(TrainSettings(**limits))
    trainer.training_step(trainer.model, list(one_step(mixed_rollouts(model)).micro_batches))
    assert trainer.failure
    assert trainer.failure.startswith(reason)
    assert f"{next(iter(limits))} {next(iter(limits.values())):g}" in trainer.failure
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


DISK = """
mount -t tmpfs -o size={size}k tmpfs checkpoints || exit 77
{python} -c '{twice}' {train} {last} || exit 1
find checkpoints -name '.tmp-*'; ls -d checkpoints/policy-* checkpoints/optimizer/*; cat checkpoints/latest
"""


TWICE = """
import os, sys
from tests.training.support.processes.imports import import_once
import_once()
from trainspan_cli.main import run
*train, last = sys.argv[1:]
for options in (["--follow", "--rounds", "3"], ["--dataset", last]):
    pid = os.fork()  # importing everything takes several times as long as a round
    if not pid:
        sys.exit(run([*train, *options]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print("code", code)
"""


@pytest.mark.ci
def test_a_disk_that_fills_while_saving_keeps_the_previous_policy_and_says_why(
    tmp_path: Path, model: Any, model_dir: Path
) -> None:
    """The disk holds one checkpoint with Adam's state (weights × 3) and not two."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare to mount a small disk with")
    for round_ in range(3):
        last = write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    (tmp_path / "checkpoints").mkdir()
    size = (model_dir / "model.safetensors").stat().st_size // 1024 * 5
    train = f"train --model {model_dir} --policy-url none --learning-rate 1e-5 --format json"
    script = DISK.format(size=size, python=sys.executable, twice=TWICE, train=train, last=last)
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env=os.environ | {"TRAINSPAN_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
    lines = done.stdout.splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    first, second, third, again = (event for event in events if event["event"] == "round")
    assert (first["version"], first["error"]) == (1, None)
    for event in (second, third, again):
        assert event["version"] == 1
        assert event["error"].startswith("cannot save policy-000002: ")
        assert "No space left on device" in event["error"]
    assert "code 1" in lines
    assert done.stderr.splitlines()[-1].startswith("trainspan: cannot save policy-000002: ")
    rest = lines[lines.index("code 1") + 1 :]
    assert rest == ["checkpoints/optimizer/policy-000001", "checkpoints/policy-000001", "policy-000001"]


def kill(tmp_path: Path, model: Any, model_dir: Path, moments: int, timeout_s: float = 280) -> dict[str, Any]:
    for round_ in range(4):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=round_), round_=round_)
    program = (
        "tests.training.support.processes.killing",
        *map(str, (model_dir, tmp_path / "dataset", tmp_path)),
        str(moments),
    )
    done = run_forked(tmp_path, *program, timeout_s=timeout_s, TRAINSPAN_HOME=str(tmp_path / "home"))
    assert done.code == 0, done.err[-3000:]
    report: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return report | {"stderr": done.err.splitlines()}


def assert_unharmed(report: dict[str, Any], moments: int) -> None:
    assert len(report["whole"]["policies"]) == 4
    assert len({dataset for _, _, dataset, _ in report["whole"]["policies"]}) == 4
    assert report["whole"]["optimizer"]
    assert len(report["killed"]) == moments + 1
    for run in report["killed"]:
        assert (run["killed"], run["resumed"]) == (9, 0), run["moment"]
        assert run["state"] == report["whole"], run["moment"]


def test_a_kill_at_three_moments_ends_in_the_weights_of_an_undisturbed_run_to_the_bit(
    tmp_path: Path, model: Any, model_dir: Path
) -> None:
    report = kill(tmp_path, model, model_dir, 3)
    assert_unharmed(report, 3)
    assert len({tuple(run["left"]) for run in report["killed"]}) >= 3, "in three different rounds"
    assert any("repeating its steps from" in line for line in report["stderr"]), (
        "one was killed before Adam's state was whole"
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_kill_at_any_of_24_moments_ends_in_the_weights_of_an_undisturbed_run_to_the_bit(
    tmp_path: Path, model: Any, model_dir: Path
) -> None:
    assert_unharmed(kill(tmp_path, model, model_dir, 24, timeout_s=1100), 24)


@pytest.mark.parametrize(
    ("more", "swap", "failure"),
    [
        ({}, Swap("swapped", {}), None),
        ({}, Swap("busy", {"error": "busy"}), None),
        ({}, Swap("unreachable", {"error": "gone"}), None),
        ({}, Swap("failed", {"error": "500"}), "500"),
        ({}, Swap("unfit", {"error": "another vocabulary"}), "another vocabulary"),
        ({"skipped": "no rows"}, Swap("off", None), "no rows"),
        ({"error": "the loss is nan", "skipped": None}, Swap("off", None), "the loss is nan"),
    ],
)
def test_a_round_fails_unless_the_server_may_still_take_it(
    more: dict[str, Any], swap: Swap, failure: str | None
) -> None:
    assert RoundResult(1, 1, None, None, swap, **more).failure == failure
