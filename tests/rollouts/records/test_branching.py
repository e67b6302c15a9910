"""Branches with several policy servers, some of which are away, and agents that did not get to their state."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainspan_rollouts.executors.branching import Branching
from trainspan_rollouts.executors.command_executor import CommandExecutor
from trainspan_rollouts.executors.executor import AgentSpec, Ended, Execution
from trainspan_rollouts.task_file import Task
from trainspan_schemas.artifacts.branches import BranchPoint, StoredCalls
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_schemas.telemetry.prefix import LONGEST_LIFE_S, PREFIX_PATH, ForcedCall, ForcedChoice, ForcedPrefix
from trainspan_schemas.telemetry.status import RolloutStatus

FOLLOWED = {"forced": 1, "missing": 0, "sampled": 2, "diverged": None}
UNUSED = {"forced": 0, "missing": 1, "sampled": 0, "diverged": None}
AWAY = "http://127.0.0.1:9"  # the discard port, which nobody listens on
POINT = BranchPoint("origin", 0, 1, 0, {"id": "t"})
STORED = StoredCalls((ForcedCall(0, bytes(4), (ForcedChoice(bytes(4), bytes(4), "stop"),), 0),), ("0" * 32,), bytes(8))
EXECUTION = Execution(Task("t", "x"), Identity("branch", "run", "t", 0, 0), TraceParent("1" * 32, "2" * 16), "token")
REGISTERED: list[bytes] = []
"""Prefixes that the servers below accepted."""


class StoredBranch:
    def calls(self, point: BranchPoint) -> StoredCalls:
        return STORED


class Agent:
    def __init__(self, status: RolloutStatus) -> None:
        self.status = status

    async def start(self) -> None: ...

    async def execute(self, execution: Execution) -> Ended:
        return Ended(self.status, 1.0)

    async def close(self) -> None: ...


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], str]]:
    """Starts an HTTP server that accepts every prefix and answers its end with these bytes; returns its URL."""
    servers = []

    def start(end: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["Content-Length"]))
                REGISTERED.extend([sent] if self.path == PREFIX_PATH else [])
                body = b"{}" if self.path == PREFIX_PATH else end
                self.send_response(200)
                self.send_header("Content-Length", str(len(body) + (self.path != PREFIX_PATH and end == b"cut")))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def branched(urls: list[str], status: RolloutStatus = "ok") -> Ended:
    branching = Branching(StoredBranch(), urls, b"key", 60.0)
    return asyncio.run(branching.execute(POINT, EXECUTION, Agent(status)))


def said(outcome: dict[str, Any]) -> bytes:
    return json.dumps(outcome).encode()


def test_a_branch_whose_calls_reached_a_server_that_was_away_at_first_is_tried_again(
    serve: Callable[[bytes], str],
) -> None:
    """It sampled freely there: that the others saw nothing is not the agent's doing."""
    ended = branched([AWAY, serve(said(UNUSED))])
    assert (ended.status, "cannot be reached" in (ended.error or "")) == ("infra_error", True)


def test_a_prefix_lives_no_longer_than_a_server_allows(serve: Callable[[bytes], str]) -> None:
    branching = Branching(StoredBranch(), [serve(said(FOLLOWED))], b"key", 86_400.0)
    assert asyncio.run(branching.execute(POINT, EXECUTION, Agent("ok"))).status == "ok"
    assert ForcedPrefix.from_json(REGISTERED[-1]).lives_s == LONGEST_LIFE_S


def test_servers_that_are_away_do_not_stop_branches_on_others(serve: Callable[[bytes], str]) -> None:
    assert branched([AWAY, serve(said(FOLLOWED)), serve(said(UNUSED))]).status == "ok"
    ended = branched([AWAY])
    assert ended.status == "infra_error"
    assert "cannot be reached" in (ended.error or "")


@pytest.mark.parametrize("end", [b"cut", b"not JSON", b"[" * 5000, b'{"forced": 1e999}'])
def test_an_end_that_cannot_be_read_is_made_up_for_only_by_the_server_that_saw_the_calls(
    serve: Callable[[bytes], str], end: bytes
) -> None:
    broken = serve(end)
    assert branched([broken, serve(said(FOLLOWED))]).status == "ok"
    assert branched([broken, serve(said(UNUSED))]).status == "infra_error"  # the broken one may have had the calls


def test_repeated_answers_of_two_servers_count_together(serve: Callable[[bytes], str]) -> None:
    """The balancer sent the later calls elsewhere, because the first server was away for a moment."""
    first = serve(said({**FOLLOWED, "forced": 2, "missing": 2, "sampled": 0}))
    second = serve(said({**FOLLOWED, "forced": 2, "missing": 2}))
    assert branched([first, second]).status == "ok"
    ended = branched([serve(b"cut"), second])  # which may have repeated the other two
    assert ended.status == "infra_error"
    assert branched([serve(said(UNUSED)), second]).status == "diverged"


def test_a_branch_from_the_first_call_is_registered_too(serve: Callable[[bytes], str]) -> None:
    """The server then gives it a seed of its own, and sees whether it begins in the stored state."""
    first = BranchPoint("origin", 0, 0, 0, {"id": "t"})
    branching = Branching(StoredBranch(), [serve(said({**FOLLOWED, "forced": 0, "diverged": "call 0"}))], b"key", 60.0)
    assert asyncio.run(branching.execute(first, EXECUTION, Agent("ok"))).status == "diverged"


def test_an_agent_that_did_not_get_to_its_state_is_no_evidence_whatever_its_end(
    serve: Callable[[bytes], str],
) -> None:
    missing, silent = serve(said(UNUSED)), serve(said({**FOLLOWED, "sampled": 0}))
    for status in ("ok", "agent_error", "timeout"):
        assert branched([missing], status).status == "diverged"  # type: ignore[arg-type]
        assert branched([silent], status).status == "diverged"  # type: ignore[arg-type]
    assert branched([missing], "timeout").error == ("the agent timed out before 1 of the stored answers were asked for")
    followed = serve(said(FOLLOWED))
    assert branched([followed], "timeout").status == "timeout"


@pytest.mark.ci
def test_the_time_of_repeated_answers_counts_as_spent(serve: Callable[[bytes], str]) -> None:
    async def status(answered_s: float) -> str:
        program = (sys.executable, "-c", "import time; time.sleep(1)")
        spec = AgentSpec(program, "http://127.0.0.1:9/v1", Collectors.of(AWAY), 60.0, 1, None)
        executor = CommandExecutor(spec, dict(os.environ))
        await executor.start()
        try:
            branching = Branching(StoredBranch(), [serve(said(FOLLOWED))], b"key", 60.0)
            return (await branching.execute(replace(POINT, answered_s=answered_s), EXECUTION, executor)).status
        finally:
            await executor.close()

    assert asyncio.run(status(0.0)) == "ok"
    assert asyncio.run(status(59.5)) == asyncio.run(status(99.0)) == "timeout"
