"""The built wheel with each extra alone, in fresh environments of every installed Python."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processing.support.traces import TestRollout, chain, send
from tests.support.dataset_files import LoggedCall, write_dataset
from tests.support.models.canary import logprobs_of
from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT
from trainspan_schemas.store.access import StoreAddress, running_collector

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1800)]

AGENT = "def solve(task):\n    return 0.5\n"


def interpreters() -> list[Path]:
    """One interpreter of each supported and installed minor version: this one, pyenv's, and those on PATH."""
    known = [Path(sys.executable), *sorted((Path.home() / ".pyenv" / "versions").glob("3.1[123].*/bin/python"))]
    known += [Path("/usr/bin") / f"python3.{minor}" for minor in (11, 12, 13)]
    found: dict[str, Path] = {}
    for path in known:
        if path.exists():
            version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            found.setdefault(version.rpartition(".")[0], path)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with trainspan."""

    path: Path
    home: Path

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not re.match("TRAINSPAN_|OTEL_|PYTHON", name)}
        return {**kept, "PATH": f"{self.path / 'bin'}:/usr/bin:/bin", "TRAINSPAN_HOME": str(self.home)}

    def run(self, *arguments: str, timeout_s: float = 300.0) -> "subprocess.CompletedProcess[str]":
        """Runs a trainspan command line."""
        return subprocess.run(
            [self.path / "bin" / "trainspan", *arguments],
            cwd=self.path,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def findings(self) -> dict[str, str]:
        """Extra → level of its installation finding, from the beginning of `trainspan doctor`."""
        findings = json.loads(self.run("doctor", "--format", "json").stdout)
        return {one["subject"]: one["level"] for one in reversed(findings)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(pip, check=True, timeout=300)
    (built,) = folder.glob("trainspan-*.whl")
    return built


def install(wheel: Path, python: Path, place: Path, *extras: str) -> Environment:
    path = place / ("-".join(extras) or "base")
    subprocess.run([python, "-m", "venv", str(path)], check=True, timeout=120)
    wanted = f"trainspan[{','.join(extras)}] @ {wheel.as_uri()}" if extras else str(wheel)
    pip = [path / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints" / "cpu.txt"]
    subprocess.run([*pip, wanted], check=True, timeout=1200)
    return Environment(path, place / "home")


@contextmanager
def collecting(environment: Environment, store: Path) -> Iterator[StoreAddress]:
    """Runs `trainspan collector` in that environment."""
    command = [environment.path / "bin" / "trainspan", "collector", "--store", str(store), "--http", "off"]
    process = subprocess.Popen(
        [*command, "--grpc", "127.0.0.1:0", "--flight", "127.0.0.1:0"],
        env=environment.environ,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    try:
        while (address := running_collector(store)) is None:
            assert process.poll() is None, "the collector exited"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def send_two(address: StoreAddress) -> None:
    rollouts: Sequence[TestRollout] = [chain(TestRollout(name), 2).reward(float(name == "a")) for name in "ab"]
    assert address.grpc is not None
    send(address.grpc, rollouts, address.token)


def training_options(folder: Path) -> list[str]:
    """Arguments of `trainspan train`, with a model and a dataset created in `folder`."""
    model = make_tiny_model(folder / "model")
    sampled = logprobs_of(model, [3, 4], [5, 6])  # with another policy's log-probabilities the round would be refused
    calls = [LoggedCall(name, [3, 4], [5, 6], sampled, value) for name, value in (("a", 1.0), ("b", -1.0))]
    write_dataset(folder / "to-train", calls)
    return ["--model", str(model), "--policy-url", "none", "--dataset", str(folder / "to-train")]


@pytest.mark.parametrize("python", interpreters(), ids=lambda path: path.parent.parent.name)
def test_agents_collector_and_processing_each_work_alone(wheel: Path, python: Path, tmp_path: Path) -> None:
    base = install(wheel, python, tmp_path)
    collector = install(wheel, python, tmp_path, "collector")
    processing = install(wheel, python, tmp_path, "processing")
    store, out = tmp_path / "spans.duckdb", tmp_path / "dataset"
    (base.path / "agent.py").write_text(AGENT)
    (base.path / "tasks.jsonl").write_text('{"id": "t", "input": "x"}\n')
    with collecting(collector, store) as address:
        send_two(address)
        options = ["--collector", f"http://{address.grpc}", "--n", "1", "--format", "json"]
        rolled = base.run("rollout", "--tasks", "tasks.jsonl", *options, "agent.py:solve")
        assert rolled.returncode == 0, rolled.stderr
        assert json.loads(rolled.stdout.splitlines()[-1])["mean_reward"] == 0.5
        asked = collector.run("sql", "SELECT count(*) AS n FROM rollouts", "--store", str(store), "--format", "json")
        assert '"n": 3' in asked.stdout, asked.stderr
        options = ["--store", f"grpc://{address.flight}", "--run", "run", "--round", "0", "--out", str(out)]
        built = processing.run("dataset", *options, "--format", "json")
        assert built.returncode == 0, built.stderr
        assert json.loads(built.stdout)["rows"] == 4
    assert (base.findings()["collector"], base.findings()["processing"]) == ("note", "note")
    assert (collector.findings()["collector"], collector.findings()["processing"]) == ("ok", "note")
    assert (processing.findings()["collector"], processing.findings()["processing"]) == ("note", "ok")
    for environment, arguments, extra in (
        (base, ["collector"], "collector"),
        (base, ["dataset"], "processing"),
        (base, ["train", *training_options(tmp_path)], "training"),
        (base, ["serve", "."], "serve-cpu"),
        (collector, ["dataset", "--store", str(store)], "processing"),
        (processing, ["dataset", "--store", str(store)], "collector"),
    ):
        done = environment.run(*arguments)
        assert done.returncode == 1
        assert f"pip install '{wheel}[{extra}]'" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_training_works_alone(wheel: Path, tmp_path: Path) -> None:
    training = install(wheel, Path(sys.executable), tmp_path, "training")
    options = ["--checkpoints", str(tmp_path / "checkpoints"), "--format", "json"]
    done = training.run("train", *training_options(tmp_path), *options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints" / "policy-000001" / "model.safetensors").exists()
    assert training.findings()["training"] == "ok"
