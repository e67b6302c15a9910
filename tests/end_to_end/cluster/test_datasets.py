"""`trainspan dataset --engine ray` on a cluster: the bytes are those of one process."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.cluster.conftest import wait_for
from tests.processing.conftest import RunningCollector
from tests.processing.support.traces import TestRollout, chain
from tests.support.dataset_command import RUN, DatasetCommand
from tests.support.ray_cluster import RayCluster


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two stores with half of thirty rollouts each; of some, a reward came late, and some calls lack their tokens."""
    running = [RunningCollector(tmp_path_factory.mktemp(f"ray-store-{number}")) for number in range(2)]
    try:
        for collector in running:
            collector.wait()
        made = []
        for number in range(30):
            rollout = chain(TestRollout(f"{RUN}-{number:02d}", run=RUN, task=f"t{number % 5}"), 1 + number % 4)
            if number % 7 == 3:
                rollout.call(1 + number % 4, [], [])
            made.append(rollout.reward(0.1 * (number % 3)))
        running[0].send(made[::2])
        running[1].send(made[1::2])
        yield [str(collector.store) for collector in running]
    finally:
        for collector in running:
            collector.stop()


@pytest.fixture
def command(tmp_path: Path, cluster: RayCluster, stores: list[str]) -> DatasetCommand:
    return DatasetCommand(tmp_path, cluster, stores)


def _without_time(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name not in ("path", "rows_url", "sha256", "as_of_ns")}


@pytest.mark.ci
def test_the_bytes_on_ray_are_those_of_one_process(command: DatasetCommand) -> None:
    one = command.run("one")
    ray = command.run("ray", "--engine", "ray")
    assert len(one["files"]) > 5
    assert command.files("ray") == command.files("one")
    assert _without_time(ray) == _without_time(one)


@pytest.mark.ci
def test_tasks_on_ray_write_to_a_url_by_themselves(command: DatasetCommand) -> None:
    """Without a shared folder: spilled calls are under the URL as well while the dataset is made."""
    one = command.run("one")
    ray = command.run(f"file://{command.folder}/bucket", "--engine", "ray")
    there = {path.name: path.read_bytes() for path in Path(ray["rows_url"].removeprefix("file://")).iterdir()}
    assert there == {path.name: path.read_bytes() for path in (command.folder / "one" / "round-0000").iterdir()}
    assert len(list((command.folder / "bucket").iterdir())) == 3
    assert _without_time(ray) == _without_time(one)


@pytest.mark.ci
@pytest.mark.parametrize(("cpus", "threads"), [("1", "1"), ("1.5", "2")])
def test_a_task_has_as_many_threads_as_cpus(command: DatasetCommand, cpus: str, threads: str) -> None:
    (command.folder / "code" / "counting.py").write_text(
        "import os, pathlib, polars\n"
        "def threads(rollout):\n"
        "    pathlib.Path(os.environ['FOLDER'], f'threads-{os.getpid()}').write_text(str(polars.thread_pool_size()))\n"
        "    return float(len(rollout.calls))\n"
    )
    command.environ["TRAINSPAN_RAY__WORKER_CPUS"] = cpus
    command.run("counted", "--engine", "ray", "--reward", "counting:threads")
    assert {path.read_text() for path in command.folder.glob("threads-*")} == {threads}


def _lines(errors: str) -> list[str]:
    """What the command itself says, without notices of Ray, whose threads may write into the same line."""
    assert "Traceback" not in errors
    found = re.findall(r"trainspan: .*", errors)
    assert found, errors
    return found


RAYS_OWN_END = "task_manager.cc"
"""Ray 2.60 now and then ends its driver by a check of its own when a task fails."""


@pytest.mark.ci
def test_an_error_of_a_task_is_one_line(command: DatasetCommand) -> None:
    (command.folder / "code" / "rewarding.py").write_text("def wanted(rollout):\n    return 'perhaps'\n")
    for _ in range(3):
        process = command.start("bad", "--engine", "ray", "--filter", "rewarding:wanted")
        _, errors = process.communicate(timeout=200)
        if RAYS_OWN_END not in errors:
            break
    assert process.returncode == 1
    [line] = _lines(errors)
    assert "filter 'rewarding:wanted' returned 'perhaps'" in line
    assert not list((command.folder / "bad").iterdir())


@pytest.mark.ci
def test_a_cluster_without_room_is_one_line(command: DatasetCommand) -> None:
    command.environ |= {"TRAINSPAN_RAY__WORKER_CPUS": "64", "TRAINSPAN_RAY__START_TIMEOUT_S": "3"}
    process = command.start("none", "--engine", "ray")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    [line] = _lines(errors)
    assert line.startswith(
        "trainspan: no task started on the Ray cluster within 3 s: each reserves 64 CPUs, and the cluster has 4; 4 CPUs of "
        "all its nodes are free now "
    )
    assert not list((command.folder / "none").iterdir())


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(command: DatasetCommand) -> None:
    rewarded = ("--reward", "rewarding:reward")
    one = command.run("one", *rewarded)
    (command.folder / "slow").touch()
    process = command.start("ray", "--engine", "ray", *rewarded)
    wait_for(lambda: bool(list(command.folder.glob("pid-*"))), "no task has begun")
    for path in command.folder.glob("pid-*"):
        pid = int(path.name.removeprefix("pid-"))
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
        os.kill(pid, signal.SIGKILL)
    (command.folder / "slow").unlink()
    ray = command.manifest(process)
    assert command.files("ray") == command.files("one")
    assert _without_time(ray) == _without_time(one)


@pytest.mark.slow
def test_an_interrupted_command_ends_its_tasks_and_leaves_nothing(command: DatasetCommand) -> None:
    (command.folder / "slow").touch()
    process = command.start("ray", "--engine", "ray", "--reward", "rewarding:reward")
    wait_for(lambda: bool(list(command.folder.glob("pid-*"))), "no task has begun")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not list((command.folder / "ray").iterdir())
    pids = [path.name.removeprefix("pid-") for path in command.folder.glob("pid-*")]
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "a task still runs", 20.0)


@pytest.mark.ci
def test_an_unknown_engine_is_refused(command: DatasetCommand) -> None:
    process = command.start("none", "--engine", "spark")
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors.strip()) == (2, "trainspan: engine = 'spark': use one of local, ray")
