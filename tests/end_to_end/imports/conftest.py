"""Environments with the SDKs, a scripted model, and the agent's runs, with the training files that are made of what each SDK recorded."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.end_to_end.imports.backends import PhoenixServer, phoenix_server
from tests.end_to_end.imports.tasks import answer, is_refused, scores_by_trace, write_tasks
from tests.end_to_end.matrix.environments import install_uv
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import environment
from tests.support.collector.process import CollectorProcess, running
from tests.support.otlp.http_backend import HttpBackend
from tests.support.places import ROOT

PROGRAM: Final = Path(__file__).parent / "programs" / "agent.py"
FRAMES: Final = Path(__file__).parent / "programs" / "phoenix_frames.py"
OPENAI: Final = "openai==3.57.0"
PACKAGES: Final = {
    "native": (OPENAI, f"trainspan[messages] @ {ROOT.as_uri()}"),
    "sdks": (
        OPENAI,
        "langfuse==5.0.4",
        "traceloop-sdk==0.62.4",
        "arize-phoenix-otel==0.17.2",
        "openinference-instrumentation-openai==0.1.66",
        f"trainspan @ {ROOT.as_uri()}",
    ),
    "phoenix": ("arize-phoenix==20.26.1",),
}
"""Environment → what is installed there."""
TRAINING_FILES: Final = {"sft": ("--min-reward", "1"), "dpo": ()}
"""Kind → further arguments of `trainspan export`."""


class Environments:
    """Environments of the packages, made when they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uv = install_uv(folder / "uv")

    def bin(self, name: str) -> Path:
        place = self._folder / name
        if not place.exists():
            subprocess.run([self._uv, "venv", "-q", "-p", sys.executable, place], check=True, timeout=120)
            install = [self._uv, "pip", "install", "-q", "-p", place / "bin" / "python", *PACKAGES[name]]
            subprocess.run(install, check=True, timeout=900)
        return place / "bin"


class Recorded:
    """What each SDK recorded of the agent's run on `tasks`, and the training files of it."""

    def __init__(
        self, folder: Path, tasks: list[dict[str, Any]], environments: Environments, policy: OpenAIServer
    ) -> None:
        folder.mkdir()
        self._folder, self._environments, self._policy = folder, environments, policy
        self.tasks, self.scores = tasks, scores_by_trace(tasks)
        self._task_file = write_tasks(folder / "tasks.json", tasks)
        self._made: dict[str, dict[str, bytes]] = {}

    def run(self, sdk: str, url: str, **settings: str) -> None:
        """Runs the agent to its end, under `opentelemetry-instrument` if `settings` name a collector."""
        is_native = "OTEL_EXPORTER_OTLP_ENDPOINT" in settings
        commands = self._environments.bin("native" if sdk == "native" else "sdks")
        prefix = [commands / "opentelemetry-instrument"] if is_native else []
        environ = {
            **environment({"OPENAI_BASE_URL": self._policy.url, "OPENAI_API_KEY": "none", **settings}),
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        }
        command = [*prefix, commands / "python", PROGRAM, sdk, self._task_file, url]
        done = subprocess.run(
            command, env=environ, cwd=self._folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def native(self, sdk: str = "native") -> dict[str, bytes]:
        """The training files of what was traced natively, kind → content."""
        if sdk not in self._made:
            home = self._folder / sdk
            with HttpBackend() as backend, running(home / "spans.duckdb") as collector:
                settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address.grpc}"}
                self.run(sdk, backend.url, TRAINSPAN_HOME=str(home), **settings)
                self._made[sdk] = _training_files(collector)
        return self._made[sdk]

    def bodies(self, sdk: str) -> list[tuple[str, bytes]]:
        """What the SDK's own exporter sent over HTTP."""
        with HttpBackend() as backend:
            self.run(sdk, backend.url)
        return backend.bodies

    def imported(self, name: str, files: Sequence[Path]) -> dict[str, bytes]:
        """The training files of a store of these files alone."""
        home = self._folder / f"store-{name}"
        with running(home / "spans.duckdb") as collector:
            output = _trainspan(collector, "import", *files, "--collector", f"http://{collector.address.grpc}")
            assert "left out" not in output, output
            return _training_files(collector)

    def folder(self, name: str) -> Path:
        """A new folder for files to import."""
        folder = self._folder / "files" / name
        folder.mkdir(parents=True)
        return folder

    def frames(self, server: PhoenixServer, folder: Path) -> None:
        """Has Phoenix's client write its dataframes as JSON lines."""
        python = self._environments.bin("phoenix") / "python"
        command = [python, "-W", "ignore", FRAMES, server.url, folder]
        subprocess.run(command, env=environment({}), check=True, capture_output=True, timeout=300)


def _training_files(collector: CollectorProcess) -> dict[str, bytes]:
    files = {kind: collector.store.with_name(f"{kind}.jsonl") for kind in TRAINING_FILES}
    for kind, path in files.items():
        _trainspan(collector, "export", kind, collector.store, path, *TRAINING_FILES[kind])
    return {kind: path.read_bytes() for kind, path in files.items()}


def _trainspan(collector: CollectorProcess, *arguments: object) -> str:
    command = [sys.executable, "-m", "trainspan_cli", *map(str, arguments)]
    environ = environment({"TRAINSPAN_HOME": str(collector.store.parent)})
    done = subprocess.run(
        command, env=environ, cwd=collector.store.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_json(folder: Path, name: str, pages: Sequence[object]) -> list[Path]:
    paths = [folder / f"{name}-{number}.json" for number in range(len(pages))]
    for path, page in zip(paths, pages, strict=True):
        path.write_text(json.dumps(page))
    return paths


def write_otlp(folder: Path, bodies: Sequence[tuple[str, bytes]]) -> list[Path]:
    """Each message of spans as a file."""
    messages = [body for path, body in bodies if path.endswith("/v1/traces")]
    paths = [folder / f"{number}.binpb" for number in range(len(messages))]
    for path, message in zip(paths, messages, strict=True):
        path.write_bytes(message)
    return paths


@pytest.fixture(scope="package")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    return Environments(tmp_path_factory.mktemp("environments"))


@pytest.fixture(scope="package")
def policy() -> Iterator[OpenAIServer]:
    server = OpenAIServer(answer=answer)
    server.status = lambda number: 400 if is_refused(server.requests[number - 1].body) else 200
    with server:
        yield server


@pytest.fixture(scope="package")
def phoenix(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PhoenixServer]:
    with phoenix_server(environments.bin("phoenix") / "phoenix", tmp_path_factory.mktemp("phoenix") / "home") as server:
        yield server
