"""A swap on an engine that does not wake up, or does not pause."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspan_schemas.config.settings import ServingSettings
from trainspan_serving.checkpoints.candidates import CheckpointCandidate
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.swap.engine import Engine
from trainspan_serving.swap.policy_server import BusyError, LoadFailedError, PolicyServer
from trainspan_serving.swap.policy_table import PolicyTable


class FakeClient:
    """An engine client that pauses, and cannot wake up."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def wake_up(self) -> None:
        raise RuntimeError("out of memory")

    async def pause_generation(self, **_: Any) -> None:
        self.asked.append("pause")
        raise RuntimeError("no answer")

    async def resume_generation(self) -> None:
        self.asked.append("resume")


@pytest.mark.parametrize("weights", [None, SimpleNamespace()])
@pytest.mark.parametrize("asleep", [True, False])
def test_the_gate_opens_only_if_the_server_is_awake(weights: Any, asleep: bool, tmp_path: Path) -> None:
    async def swap() -> PolicyServer:
        plan: Any = SimpleNamespace(settings=ServingSettings(drain_timeout_s=1.0), checkpoints=tmp_path)
        engine = Engine(client, merges_adapters=False)
        policies = PolicyTable(ServedPolicy("policy", 0, tmp_path), {}, {})
        nothing: Any = None
        server = PolicyServer(plan, engine, nothing, policies, nothing)
        engine.asleep = asleep
        if asleep:
            server.gate.hold()
        candidate = CheckpointCandidate(1, tmp_path / "policy-000001", weights, None, None)
        with pytest.raises(LoadFailedError, match="policy-000001"):
            await server._exchange(policies.base, candidate, {})
        return server

    client: Any = FakeClient()
    server = asyncio.run(swap())
    assert (server.asleep, server.gate.is_open) == (asleep, not asleep)
    if weights is not None:
        assert client.asked == ([] if asleep else ["pause", "resume"])


def test_a_swap_whose_engine_does_not_pause_in_time_loads_nothing_and_says_to_try_again() -> None:
    class Swap:
        async def prepare(self) -> None:
            raise TimeoutError

    server: Any = SimpleNamespace(plan=SimpleNamespace(settings=SimpleNamespace(drain_timeout_s=2.0)), asleep=False)
    swap: Any = Swap()
    with pytest.raises(BusyError, match="did not pause within 2 s"):
        asyncio.run(PolicyServer._prepare(server, swap, "policy-000001"))
