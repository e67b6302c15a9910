"""The batch jobs, run by bash with programs in place of Slurm's and of trainspan that write down how they are called."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY

RECORDER = """#!/bin/bash
trap 'echo "$1 ends" >>"$CALLS"; exit 0' TERM
echo "$(basename "$0") $*" >>"$CALLS"
case $(basename "$0") in
sbatch) echo "$(wc -l <"$CALLS")" ;;
srun) exec "$@" ;;
esac
if [[ $1 = collector || $1 = serve ]]; then
    while true; do sleep 0.1; done
fi
if [[ $1 = */probe.py && $# = 4 ]]; then [[ " ${ALIVE:-node7} " = *" $4 "* ]]; exit; fi
if [[ $1 = rollout ]]; then exit "${CODE:-0}"; fi
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment in which `trainspan`, `srun`, `sbatch` and `python` write their calls to $CALLS."""
    programs = tmp_path / "shared" / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("trainspan", "srun", "sbatch", "scontrol", "python"):
        (programs / name).write_text(RECORDER)
        (programs / name).chmod(0o755)
    (tmp_path / "shared" / "services").mkdir()
    (tmp_path / "agent").mkdir()
    return {
        "PATH": f"{programs}:/usr/bin:/bin",
        "SHARED": str(tmp_path / "shared"),
        "MODEL": "/models/tiny",
        "DEPLOY": str(DEPLOY),
        "CALLS": str(tmp_path / "calls"),
    }


def calls(cluster: dict[str, str]) -> list[str]:
    file = Path(cluster["CALLS"])
    return file.read_text().splitlines() if file.exists() else []


def run(script: str, *arguments: object, code: int = 0, **environ: str) -> None:
    command = ["bash", DEPLOY / "slurm" / script, *map(str, arguments)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr


def test_a_part_of_the_array_begins_its_shard_or_resumes_it(cluster: dict[str, str], tmp_path: Path) -> None:
    (Path(cluster["SHARED"]) / "services" / "host").write_text("node7\n")
    array = {**cluster, "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4"}
    options = f"--token-file {cluster['SHARED']}/secrets/runner/tokens.toml --run run-1"
    task = "--shard 2/4 --tasks tasks.jsonl --judge judge.py:score agent.py:solve"
    run("rollouts.sbatch", tmp_path / "agent", **array)
    assert calls(cluster)[-1] == f"trainspan rollout {options} --resume {task}"


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(75, 0, True), (75, 9, True), (75, 10, False), (1, 0, False), (0, 0, False)]
)
def test_a_part_with_rollouts_to_repeat_is_requeued(
    cluster: dict[str, str], tmp_path: Path, code: int, restarts: int, requeued: bool
) -> None:
    (Path(cluster["SHARED"]) / "services" / "host").write_text("node7\n")
    job = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_JOB_ID": "77"}
    own = {**cluster, **job, "SLURM_RESTART_COUNT": str(restarts), "CODE": str(code)}
    run("rollouts.sbatch", tmp_path / "agent", code=code, **own)
    assert ("scontrol requeue 77" in calls(cluster)) == requeued


@pytest.mark.ci
def test_a_part_waits_while_the_services_of_a_killed_job_do_not_answer(cluster: dict[str, str], tmp_path: Path) -> None:
    host = Path(cluster["SHARED"]) / "services" / "host"
    host.write_text("node6 41\n")
    array = {**cluster, "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4"}
    job = subprocess.Popen(["bash", DEPLOY / "slurm" / "rollouts.sbatch", tmp_path / "agent"], env=array)
    try:
        deadline = time.monotonic() + 60
        while not any("probe.py 8000 /health node6" in line for line in calls(cluster)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert job.poll() is None
        host.write_text("node7 42\n")
        assert job.wait(30) == 0
    finally:
        job.kill()
    assert any(line.startswith("trainspan rollout") for line in calls(cluster))


def test_services_that_end_late_leave_the_host_of_newer_ones(cluster: dict[str, str]) -> None:
    host = Path(cluster["SHARED"]) / "services" / "host"
    environ = {**cluster, "SLURM_JOB_ID": "41"}
    job = subprocess.Popen(["bash", DEPLOY / "slurm" / "services.sbatch"], env=environ, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not host.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert host.read_text().endswith(" 41\n")
        host.write_text("node7 42\n")
        job.terminate()
        assert job.wait(30) == 0
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert host.read_text() == "node7 42\n"


def test_the_trainer_and_the_rollouts_wait_for_the_services(cluster: dict[str, str], tmp_path: Path) -> None:
    run("submit.sh", tmp_path / "agent", 5, **cluster)
    slurm = DEPLOY / "slurm"
    assert calls(cluster) == [
        f"sbatch --parsable {slurm}/services.sbatch",
        f"sbatch --parsable --dependency=after:1 {slurm}/trainer.sbatch",
        f"sbatch --parsable --dependency=after:1 --array=0-4 {slurm}/rollouts.sbatch {tmp_path}/agent",
    ]


def test_the_services_name_their_host_when_they_are_ready_and_end_in_order(cluster: dict[str, str]) -> None:
    shared = Path(cluster["SHARED"])
    job = subprocess.Popen(["bash", DEPLOY / "slurm" / "services.sbatch"], env=cluster, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (shared / "services" / "host").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (shared / "services" / "host").read_text().split()[0].partition(".")[
            0
        ] == socket.gethostname().partition(".")[0]
        job.terminate()  # Slurm's signal reaches only the script
        assert job.wait(30) == 0
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert not (shared / "services" / "host").exists()
    assert (shared / "state" / "token").read_text() == (shared / "secrets" / "trainer" / "token").read_text()
    found = calls(cluster)
    assert any(line.startswith("trainspan collector --store") and "--tls-cert" in line for line in found)
    assert any(
        line.startswith("trainspan serve /models/tiny --host 0.0.0.0 -- --gpu-memory-utilization 0.9") for line in found
    )
    assert found[-2:] == ["serve ends", "collector ends"]
