"""The servers of these tests: `trainspan serve`, also with faults, and vLLM alone, also with our middleware."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serving.support.traffic import LONG_PROMPT, greedy
from tests.support.models.adapters import adapter_logprobs, load_adapter, make_adapter
from tests.support.models.canary import logprobs_of, write_checkpoint_files
from tests.support.otlp.sink import OtlpSink, otlp_sink
from tests.support.policy_server.faults import FAULT_VARIABLE
from tests.support.policy_server.plain_vllm import plain_vllm
from tests.support.policy_server.process import RunningServer, policy_server
from tests.support.ports import free_port
from trainspan_schemas.artifacts.checkpoint import CANARY_FILE, CheckpointMeta
from trainspan_schemas.config.settings import ServingSettings
from trainspan_serving.process.launch import prepare

__all__ = ["HUB_ID", "LAUNCHES", "Faulty", "Flying", "Models", "Plain", "Stack", "publish_base"]

FLAGS = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
"""Random weights would fill JSON text with whitespace forever."""
HUB_ID = "acme/tiny"


@dataclass(frozen=True, slots=True)
class Models:
    """Tied models of one architecture: `base` is version 0, the checkpoints are versions 1 and 2."""

    base: Path
    checkpoints: Path

    def folder(self, version: int) -> Path:
        return self.checkpoints / f"policy-{version:06d}" if version else self.base


def publish_base(models: Models, checkpoints: Path) -> None:
    """Version 0 as a checkpoint, so that it can be swapped in again."""
    folder = checkpoints / "policy-000000"
    if not folder.exists():
        shutil.copytree(models.base, folder)
        write_checkpoint_files(folder, 0, models.folder(1))


class Stack:
    """A policy server, and the collector stand-in that receives its spans."""

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


Flying = tuple[RunningServer, OtlpSink]
"""A server whose requests go on across swaps, and its spans."""


@contextlib.contextmanager
def _stack(models: Models, root: Path) -> Iterator[Stack]:
    stack = Stack()
    arguments = ("--collector", stack.start_collector(), "--checkpoints", str(models.checkpoints), "--sleep")
    with policy_server(models.base, root, *arguments, flags=FLAGS) as stack.server:
        yield stack
    stack.stop_collector()


@contextlib.contextmanager
def _flying(models: Models, root: Path) -> Iterator[Flying]:
    """Starts a server whose requests go on across swaps."""
    with otlp_sink() as (sink, url):
        arguments = ("--collector", url, "--checkpoints", str(models.checkpoints))
        environment = {"TRAINSPAN_SERVING__SWAP_IN_FLIGHT": "true"}
        with policy_server(models.base, root, *arguments, flags=FLAGS, environment=environment) as server:
            yield server, sink


def _bare(models: Models, root: Path) -> AbstractContextManager[RunningServer]:
    """A vLLM server with our flags but without our middleware and worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSPAN_HOME", str(root))
        launch = prepare(ServingSettings(model=str(models.base), port=0), (), os.environ)
    flags = _without(launch.flags, "--middleware", "--worker-extension-cls", "--host", "--port")
    return plain_vllm(launch.plan.model, free_port(), root, (*flags, *FLAGS), launch.environment)


def _without(flags: tuple[str, ...], *names: str) -> list[str]:
    pairs = list(flags)
    for name in names:
        place = pairs.index(name)
        del pairs[place : place + 2]
    return pairs


Faulty = tuple[RunningServer, OtlpSink, Path]
"""A server, its spans and its checkpoints; the file `fault` next to them plants a fault of tests/support/policy_server/faults.py."""


@contextlib.contextmanager
def _faulty(models: Models, root: Path) -> Iterator[Faulty]:
    """Starts a server with short timeouts, an API key, sampling by split, and prefill in chunks of 256 tokens."""
    checkpoints = root / "checkpoints"
    shutil.copytree(models.folder(1), checkpoints / "policy-000001")
    shutil.copytree(models.folder(2), checkpoints / "policy-000002")
    (checkpoints / "policy-000002" / CANARY_FILE).unlink()
    with otlp_sink() as (sink, url):
        arguments = (
            "--collector",
            url,
            "--checkpoints",
            str(checkpoints),
            "--train-sampling",
            "--val-temperature",
            "0.5",
        )
        flags = ["--worker-extension-cls", "tests.support.policy_server.faults.FaultyWorker", "--api-key", "sesame"]
        flags += ["--middleware", "tests.support.policy_server.faults.FaultyEngine", "--max-num-batched-tokens", "256"]
        environment = {
            "TRAINSPAN_SERVING__SWAP_TIMEOUT_S": "0.2",
            "TRAINSPAN_SERVING__DRAIN_TIMEOUT_S": "0.6",
            "TRAINSPAN_SERVING__BODY_TIMEOUT_S": "1.5",
            "TRAINSPAN_SERVING__MAX_BODY_BYTES": "200000",
            "TRAINSPAN_SERVING__ALLOWED_HOSTS": "policy.example, second.example",
            FAULT_VARIABLE: str(root / "fault"),
        }
        with policy_server(models.base, root, *arguments, flags=flags, environment=environment) as server:
            yield server, sink, checkpoints


class Plain:
    """A vLLM that was started with a Hugging Face id and our `--middleware`, its spans, and the adapters to swap in."""

    def __init__(self, server: RunningServer, sink: OtlpSink, base: Path, checkpoints: Path) -> None:
        self.server, self.sink, self.base, self.checkpoints = server, sink, base, checkpoints
        self.peft: dict[int, Any] = {
            version: load_adapter(base, checkpoints / f"policy-{version:06d}") for version in (1, 2)
        }

    def swap(self, version: int, name: str | None = None) -> tuple[int, dict[str, Any]]:
        return self.server.swap(name or f"policy-{version:06d}", version)

    def greedy(self) -> tuple[list[int], str]:
        return greedy(self.server, 8)

    def logprobs(self, version: int, prompt: list[int], completion: list[int]) -> list[float]:
        """Computes log-probabilities with transformers and peft."""
        if version in self.peft:
            return adapter_logprobs(self.peft[version], prompt, completion)
        return logprobs_of(self.base, prompt, completion)

    def greedy_by_peft(self, version: int) -> list[int]:
        import torch

        ids = list(LONG_PROMPT)
        with torch.inference_mode():
            for _ in range(8):
                ids.append(int(self.peft[version](torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(LONG_PROMPT) :]


@contextlib.contextmanager
def _plain(models: Models, root: Path) -> Iterator[Plain]:
    checkpoints = root / "checkpoints"
    for version in (1, 2):
        make_adapter(models.base, checkpoints / f"policy-{version:06d}", version, seed=version)
    shutil.copytree(models.folder(1), checkpoints / "policy-000007")
    CheckpointMeta("full", 7, None, HUB_ID, None).write(checkpoints / "policy-000007")
    hub, revision = root / "hf" / "hub" / "models--acme--tiny", "0" * 39 + "1"
    shutil.copytree(models.base, hub / "snapshots" / revision)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(revision)
    for version in (1, 2):
        CheckpointMeta("lora", version, HUB_ID, HUB_ID, None).write(checkpoints / f"policy-{version:06d}")
    flags = ["--served-model-name", "policy", "--dtype", "float32", "--enforce-eager", "--enable-lora"]
    flags += ["--max-lora-rank", "8", "--max-loras", "2", "--generation-config", "vllm"]
    flags += ["--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    flags += ["--logprobs-mode", "processed_logprobs", "--distributed-executor-backend", "uni"]
    flags += ["--middleware", "trainspan_serving.middleware.PolicyMiddleware"]
    with otlp_sink() as (sink, url):
        environ = {
            "HF_HOME": str(root / "hf"),
            "TRAINSPAN_COLLECTOR__ENDPOINTS": url,
            "TRAINSPAN_SERVING__CHECKPOINTS": str(checkpoints),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        with plain_vllm(HUB_ID, free_port(), root / "home", flags, environ) as server:
            yield Plain(server, sink, models.base, checkpoints)


LAUNCHES: Mapping[str, Callable[[Models, Path], AbstractContextManager[Any]]] = {
    "stack": _stack,
    "bare": _bare,
    "flying": _flying,
    "faulty": _faulty,
    "plain": _plain,
}
"""Fixture name → context manager that starts the server, given the models and a folder."""
