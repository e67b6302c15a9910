"""A policy server, a collector, and an agent whose rollouts are branched by the real commands."""

from collections.abc import Iterator

import pytest

from tests.support.agents.letters import LettersWorld
from tests.support.collector.process import CollectorProcess
from tests.support.models.tiny_model import make_tiny_model
from tests.support.policy_server.process import policy_server


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LettersWorld]:
    folder = tmp_path_factory.mktemp("branches")
    model = make_tiny_model(folder / "model", seed=3)
    collector = CollectorProcess(folder / "spans.duckdb")
    try:
        with policy_server(model, folder, "--collector", f"http://{collector.address.grpc}") as server:
            yield LettersWorld(folder, server, collector)
    finally:
        collector.terminate()
