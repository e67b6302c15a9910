"""Models, checkpoints and servers shared by the tests of the policy server; each server takes about 15 s to start."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.canary import write_checkpoint_files
from tests.support.otlp_sink import OtlpSink, free_port, otlp_sink
from tests.support.policy_server import RunningServer, policy_server
from tests.support.tiny_model import make_tiny_model

FLAGS = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
"""Random weights would fill a JSON text with spaces for ever."""


@dataclass(frozen=True, slots=True)
class Models:
    """Tied models of one architecture: `base` is version 0, the checkpoints are versions 1 and 2."""

    base: Path
    checkpoints: Path

    def folder(self, version: int) -> Path:
        return self.checkpoints / f"policy-{version:06d}" if version else self.base


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    models = Models(make_tiny_model(root / "base", seed=0, tied=True), root / "checkpoints")
    for version in (1, 2):
        folder = make_tiny_model(models.folder(version), seed=version, tied=True)
        write_checkpoint_files(folder, version, models.base)
    return models


class Stack:
    """A policy server and the collector's stand-in that its spans go to."""

    def __init__(self) -> None:
        self.collector_port = free_port()
        self._collector = contextlib.ExitStack()
        self.server: RunningServer
        self.sink: OtlpSink

    def start_collector(self) -> str:
        self.sink, url = self._collector.enter_context(otlp_sink(self.collector_port))
        return url

    def stop_collector(self) -> None:
        self._collector.close()


@pytest.fixture(scope="session")
def stack(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack()
    arguments = ("--collector", stack.start_collector(), "--checkpoints", str(models.checkpoints), "--sleep")
    with policy_server(models.base, tmp_path_factory.mktemp("home"), *arguments, flags=FLAGS) as stack.server:
        yield stack
    stack.stop_collector()


@pytest.fixture
def base_policy(stack: Stack, models: Models) -> Stack:
    """The server with version 0 in service."""
    if stack.server.policy()["version"] != 0:
        publish_base(models)
        status, answer = stack.server.swap("policy-000000", 0)
        assert status == 200, answer
    return stack


def publish_base(models: Models) -> None:
    """Version 0 as a checkpoint, so that it can be swapped in again."""
    folder = models.checkpoints / "policy-000000"
    if not folder.exists():
        shutil.copytree(models.base, folder)
        write_checkpoint_files(folder, 0, models.folder(1))
