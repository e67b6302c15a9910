"""Branches whose calls reached two policy servers: what real registries of branches say of them, and how the runner judges it."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from trainspan_rollouts.executors.branching import Branching
from trainspan_rollouts.executors.executor import Ended, Execution
from trainspan_rollouts.task_file import Task
from trainspan_schemas.artifacts.branches import BranchPoint, StoredCalls
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_schemas.telemetry.prefix import PREFIX_PATH, ForcedCall, ForcedChoice, ForcedPrefix, prompt_digest
from trainspan_schemas.telemetry.tokens import encode_ids
from trainspan_serving.forcing.divergence import DivergedError
from trainspan_serving.forcing.registry import BranchRegistry, RegistryError

PARAMS = SimpleNamespace(n=1, prompt_logprobs=None, logprobs=None)
CHOICE = ForcedChoice(encode_ids([7]), bytes(4), "stop")
CALLS = tuple(ForcedCall(index, encode_ids([index]), (CHOICE,), 0) for index in range(4))
"""Call i has the prompt [i]; the branch begins at call 4."""
POINT = BranchPoint("origin", 0, 4, 0, {"id": "t"})
STORED = StoredCalls(CALLS, (prompt_digest(encode_ids([4])),), encode_ids([4]))
EXECUTION = Execution(Task("t", "x"), Identity("branch", "run", "t", 0, 0), TraceParent("1" * 32, "2" * 16), "token")


class Replica:
    """A policy server as far as branches go: its registry, and the runner's requests over HTTP."""

    def __init__(self) -> None:
        replica = self
        self.restart()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = replica.answer(self.path, sent)
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def restart(self) -> None:
        self.registry = BranchRegistry(1000, 10**6, str)

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            if path == PREFIX_PATH:
                self.registry.register(ForcedPrefix.from_json(body))
                return 200, {}
            sent = json.loads(body)
            return 200, self.registry.end_branch(sent["rollout"], sent["attempt"]).to_record()
        except RegistryError as error:
            return error.status, {"error": str(error)}

    def ask(self, *prompts: int) -> None:
        """The agent's calls with these prompts. Raises DivergedError."""
        branch = self.registry.find(("branch", 0), None)
        assert branch is not None
        for prompt in prompts:
            branch.next_answer([prompt], PARAMS)


@pytest.fixture
def replicas() -> Iterator[tuple[Replica, Replica]]:
    both = Replica(), Replica()
    yield both
    for replica in both:
        replica.http.shutdown()
        replica.http.server_close()


def branched(replicas: tuple[Replica, Replica], agent: Callable[[], None]) -> Ended:
    class Agent:
        async def start(self) -> None: ...

        async def execute(self, execution: Execution) -> Ended:
            try:
                agent()
            except DivergedError:  # 422
                return Ended("agent_error", 1.0)
            return Ended("ok", 1.0)

        async def close(self) -> None: ...

    class Source:
        def calls(self, point: BranchPoint) -> StoredCalls:
            return STORED

    branching = Branching(Source(), [replica.url for replica in replicas], b"key", 60.0)
    return asyncio.run(branching.execute(POINT, EXECUTION, Agent()))


def test_calls_that_two_servers_shared_before_the_branch_began_are_added_up(replicas: tuple[Replica, Replica]) -> None:
    a, b = replicas

    def agent() -> None:
        a.ask(0, 1)
        b.ask(2, 3, 4, 99)

    assert branched(replicas, agent).status == "ok"


@pytest.mark.parametrize(
    ("before", "lost", "after"), [((), (0, 1), (2, 3, 4, 99)), ((0, 1, 2), (3, 4), (99,)), ((0, 1, 2, 3), (4,), ())]
)
def test_a_server_that_was_restarted_may_have_had_the_calls_that_no_other_saw(
    replicas: tuple[Replica, Replica], before: tuple[int, ...], lost: tuple[int, ...], after: tuple[int, ...]
) -> None:
    a, b = replicas

    def agent() -> None:
        b.ask(*before)
        a.ask(*lost)
        a.restart()
        b.ask(*after)

    ended = branched(replicas, agent)
    assert (ended.status, "has no prefix here" in (ended.error or "")) == ("infra_error", True)


def test_a_server_that_did_not_see_where_the_branch_began_is_no_judge_of_it(replicas: tuple[Replica, Replica]) -> None:
    a, b = replicas

    def agent() -> None:
        a.ask(0, 1, 2, 3, 4)
        b.ask(99)

    ended = branched(replicas, agent)
    assert (ended.status, "the calls of one branch reached several" in (ended.error or "")) == ("infra_error", True)


def test_an_agent_that_makes_another_call_has_diverged_wherever_its_calls_went(
    replicas: tuple[Replica, Replica],
) -> None:
    a, b = replicas

    def agent() -> None:
        a.ask(0, 1)
        b.ask(2, 99)

    ended = branched(replicas, agent)
    assert (ended.status, "the prompt differs" in (ended.error or "")) == ("diverged", True)
    assert branched(replicas, lambda: b.ask(0, 1)).status == "diverged"
