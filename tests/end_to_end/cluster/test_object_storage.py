"""Datasets on an S3 server: written by one process and by Ray's tasks, read by the trainer, whole whatever is killed."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests.end_to_end.cluster.conftest import wait_for
from tests.processing.conftest import RunningCollector
from tests.processing.support.traces import TestRollout
from tests.support.dataset_command import RUN, DatasetCommand
from tests.support.dataset_files import sample_rollouts
from tests.support.models.tiny_model import make_tiny_model
from tests.support.ray_cluster import RayCluster
from tests.support.s3_server import S3Server
from trainspan_cli.main import run
from trainspan_schemas.artifacts.checkpoint import digest_of_model
from trainspan_schemas.errors import pip_install

_HELD = """
import os, pathlib, time
from trainspan_schemas.files.objects import Objects

upload = Objects.upload

def held(self, name, source):
    upload(self, name, source)
    folder = pathlib.Path(os.environ["FOLDER"])
    while name == "part-00001.parquet" and (folder / "hold").exists():
        (folder / "held").touch()
        time.sleep(0.05)

Objects.upload = held
"""
"""Stops while the file `hold` exists, once the second part is uploaded."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=512)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[str]:
    """Two rounds of eight rollouts that the model sampled, four of each task."""
    from trainspan_training.model.loading import load_model

    collector = RunningCollector(tmp_path_factory.mktemp("store"))
    try:
        collector.wait()
        model, base = load_model(model_dir).eval(), digest_of_model(model_dir)
        for round_ in range(2):
            rollouts: dict[str, TestRollout] = {}
            for call in sample_rollouts(model, rollouts=8, seed=round_):
                number = len(rollouts)
                one = rollouts.setdefault(
                    call.rollout_id, TestRollout(call.rollout_id, run=RUN, round=round_, task=f"t{number // 4}")
                )
                one.call(
                    call.call_index,
                    call.prompt_ids,
                    call.completion_ids,
                    logprobs=call.logprobs,
                    trainspan__policy__base=base,
                )
            collector.send([one.reward(float(number % 2)) for number, one in enumerate(rollouts.values())])
        yield str(collector.store)
    finally:
        collector.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(server: S3Server) -> Iterator[str]:
    """The URL of a bucket that is empty."""
    server.files.mkdir("bucket")
    yield "s3://bucket/datasets"
    server.files.rm("bucket", recursive=True)


@pytest.fixture
def command(tmp_path: Path, request: pytest.FixtureRequest, store: str, server: S3Server) -> DatasetCommand:
    is_slow = request.node.get_closest_marker("slow") is not None
    cluster: RayCluster | None = request.getfixturevalue("cluster") if is_slow else None
    command = DatasetCommand(tmp_path, cluster, [store], server.environ)
    with (tmp_path / "code" / "sitecustomize.py").open("a") as file:
        file.write(_HELD)
    return command


def _parts(server: S3Server, manifest: dict[str, Any]) -> dict[str, bytes]:
    """Name → content of the objects of a dataset's rows, and its ledger."""
    files = server.files
    found = {name.rpartition("/")[2]: files.cat_file(name) for name in files.ls(manifest["rows_url"], detail=False)}
    return found | {"rollouts.jsonl": files.cat_file(f"{manifest['rows_url']}.about/rollouts.jsonl")}


def _local_parts(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found | {"rollouts.jsonl": folder.with_name(f"{folder.name}.about").joinpath("rollouts.jsonl").read_bytes()}


def _train(command: DatasetCommand, dataset: str, model: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    options = ("--model", str(model), "--policy-url", "none", "--learning-rate", "1e-6", "--format", "json")
    return subprocess.run(
        [sys.executable, "-m", "trainspan_cli", "train", "--dataset", dataset, *options],
        env={**command.environ, "OMP_NUM_THREADS": "1", **environ},
        cwd=command.folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def _names(server: S3Server) -> list[str]:
    found = server.files.glob("bucket/datasets/*")
    return sorted(name.rpartition("/")[2] for name in found)


@pytest.mark.ci
def test_the_bytes_on_s3_are_those_of_a_folder_and_the_trainer_reads_them(
    command: DatasetCommand, bucket: str, server: S3Server, model_dir: Path
) -> None:
    local = command.run("local", "--round", "0")
    there = command.run(bucket, "--round", "0")
    assert (there["path"], len(local["files"])) == (f"{bucket}/round-0000", 2)
    assert _parts(server, there) == _local_parts(command.folder / "local" / "round-0000")
    folder = there["rows_url"].rpartition("/")[2]
    assert _names(server) == sorted([folder, f"{folder}.about", "round-0000.json"])
    done = _train(command, bucket, model_dir)
    assert (done.returncode, done.stderr) == (0, "")
    event = json.loads(done.stdout.splitlines()[-1])
    assert (event["event"], event["round"], event["version"]) == ("round", 0, 1)


@pytest.mark.slow
def test_the_bytes_on_s3_that_rays_tasks_write_are_those_of_a_folder(
    command: DatasetCommand, bucket: str, server: S3Server, model_dir: Path
) -> None:
    command.run("local", "--round", "0")
    ray = command.run(bucket, "--round", "0", "--engine", "ray")
    assert _parts(server, ray) == _local_parts(command.folder / "local" / "round-0000")
    diff = [sys.executable, "-m", "trainspan_cli", "diff", "local/round-0000", ray["path"]]
    compared = subprocess.run(
        diff, env=command.environ, cwd=command.folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert (compared.returncode, compared.stderr) == (0, ""), compared.stdout
    assert _train(command, bucket, model_dir).returncode == 0
    again = _train(command, bucket, model_dir)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert f"all 1 datasets in {bucket} are used already" in again.stderr


def _killed(command: DatasetCommand, bucket: str, *options: str) -> None:
    """Kills a command that has uploaded a part of round 1, with SIGKILL."""
    (command.folder / "hold").touch()
    process = command.start(bucket, "--round", "1", *options)
    try:
        wait_for((command.folder / "held").exists, "no part was uploaded")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    (command.folder / "hold").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--engine", "ray")], ids=["one process", "ray"])
def test_a_killed_command_leaves_the_earlier_dataset_and_a_folder_that_no_dataset_names(
    command: DatasetCommand, bucket: str, server: S3Server, model_dir: Path, options: tuple[str, ...]
) -> None:
    first = command.run(bucket, "--round", "0")
    before = _parts(server, first)
    _killed(command, bucket, *options)
    left = [name for name in _names(server) if name.startswith("round-0001.")]
    assert {name.partition(".")[2].partition(".")[2] for name in left} <= {"", "calls"}
    assert any(name.endswith(".calls") for name in left)
    assert _parts(server, first) == before
    other_home = str(command.folder / "another-home")
    assert _train(command, bucket, model_dir, TRAINSPAN_HOME=other_home).returncode == 0
    second = command.run(bucket, "--round", "1")
    folders = [manifest["rows_url"].rpartition("/")[2] for manifest in (first, second)]
    whole = [f"{folder}{ending}" for folder in folders for ending in ("", ".about")]
    assert _names(server) == sorted([*whole, *left, "round-0000.json", "round-0001.json"])
    for round_ in ("0", "1"):
        command.run("local", "--round", round_)
    assert _parts(server, second) == _local_parts(command.folder / "local" / "round-0001")


def test_a_corrupted_object_is_refused_by_name(
    command: DatasetCommand, bucket: str, server: S3Server, model_dir: Path
) -> None:
    place = command.run(bucket, "--round", "0")["rows_url"]
    server.files.pipe_file(f"{place}/part-00001.parquet", b"corrupted")
    done = _train(command, f"{bucket}/round-0000", model_dir)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"trainspan: {place}/part-00001.parquet has sha256 ")


@pytest.mark.parametrize(
    ("environ", "url", "code", "message"),
    [
        ({}, "s3://missing/datasets", 1, "there is no such bucket or object: create the bucket, or correct the URL"),
        ({}, "s3://key:s3cret@bucket/datasets", 2, "has credentials or a query in it"),
        (
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_EC2_METADATA_DISABLED": "true"},
            "s3://bucket/datasets",
            1,
            "check the credentials, such as AWS_ACCESS_KEY_ID or AWS_PROFILE",
        ),
        pytest.param(
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            "s3://bucket/datasets",
            1,
            "check the network, and AWS_ENDPOINT_URL if it is set",
            marks=pytest.mark.slow,  # four attempts
        ),
    ],
)
def test_a_store_that_cannot_be_used_ends_the_command_in_one_line(
    environ: dict[str, str | None],
    url: str,
    code: int,
    message: str,
    bucket: str,
    store: str,
    server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    for name, value in {**server.environ, **environ}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    assert run(["dataset", "--store", store, "--run", RUN, "--out", url]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainspan: ")
    assert message in line
    assert "s3cret" not in line
    assert _names(server) == []


def test_without_its_extra_a_url_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['s3fs'] = None; from trainspan_cli.main import run; "
        "sys.exit(run(['diff', 's3://bucket/x/round-0000', 's3://bucket/x/round-0001']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == f"trainspan: s3://bucket/x needs s3fs: {pip_install('s3')}"
