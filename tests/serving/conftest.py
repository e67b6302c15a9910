"""Models, checkpoints and servers shared by the tests of the policy server."""

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.support.servers import LAUNCHES, Faulty, Flying, Models, Plain, Stack, publish_base
from tests.support.models.canary import write_checkpoint_files
from tests.support.models.tiny_model import make_tiny_model
from tests.support.policy_server.process import RunningServer

Servers = Mapping[str, "Future[Any]"]


def add_what_models_compute(folder: Path) -> Path:
    """Adds tensors that many published models contain: the head of a tied model, and a buffer of rotary frequencies."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(16.0)
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    models = Models(add_what_models_compute(make_tiny_model(root / "base", seed=0, tied=True)), root / "checkpoints")
    for version in (1, 2):
        folder = make_tiny_model(models.folder(version), seed=version, tied=True)
        write_checkpoint_files(folder, version, models.base)
    return models


@pytest.fixture(scope="package")
def servers(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """The servers that the tests of this folder need, started together: each takes about 13 s, nearly all on one core."""
    here = [item for item in request.session.items if item.path.is_relative_to(Path(__file__).parent)]
    asked = {name for item in here for name in getattr(item, "fixturenames", ())}
    launches = {name: LAUNCHES[name](models, tmp_path_factory.mktemp(name)) for name in LAUNCHES if name in asked}
    with contextlib.ExitStack() as running, ThreadPoolExecutor(len(launches)) as pool:
        started = {name: pool.submit(running.enter_context, launch) for name, launch in launches.items()}
        wait(started.values())
        yield started


@pytest.fixture(scope="package")
def stack(servers: Servers) -> Stack:
    stack: Stack = servers["stack"].result()
    return stack


@pytest.fixture(scope="package")
def bare(servers: Servers) -> str:
    """The URL of the vLLM server without our middleware and worker."""
    server: RunningServer = servers["bare"].result()
    return server.url


@pytest.fixture(scope="package")
def faulty(servers: Servers) -> Faulty:
    faulty: Faulty = servers["faulty"].result()
    return faulty


@pytest.fixture(scope="package")
def flying(servers: Servers) -> Flying:
    flying: Flying = servers["flying"].result()
    return flying


@pytest.fixture(scope="package")
def plain(servers: Servers) -> Plain:
    plain: Plain = servers["plain"].result()
    return plain


@pytest.fixture
def base_policy(stack: Stack, models: Models) -> Stack:
    """The server with version 0 in service."""
    if stack.server.policy()["version"] != 0:
        publish_base(models, models.checkpoints)
        status, answer = stack.server.swap("policy-000000", 0)
        assert status == 200, answer
    return stack
