"""A small HTTP server that answers swap requests as configured, and records them."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainspan_schemas.home import token_digest
from trainspan_schemas.policy_server import CallCounts, PolicyInService, ServerState


@dataclass
class PolicyServer:
    url: str
    answers: list[tuple[int, dict[str, Any]]]
    """Status and body of each answer in turn; the last one repeats."""
    asked: list[tuple[str, str | None, dict[str, Any]]] = field(default_factory=list)
    """(path, Authorization, body) of each request."""
    state: dict[str, Any] = field(default_factory=dict)
    """What its state has beside `USUAL`; without anything it has none. A swap that is answered with 200 changes it."""
    on_refusal: Callable[[], None] = lambda: None
    """Called before a swap is refused."""
    silent: int = 0
    """How many of the next requests for the state are answered as if the server were not there."""


_POLICY = PolicyInService(0, "model", None, "full", None, None)
USUAL = ServerState(
    alone=_POLICY,
    policies={},
    base="model",
    model="policy",
    dtype="float32",
    started_ns=1,
    now_ns=2**62,  # not behind
    in_flight=0,
    requests_ended=0,
    internal_requests=0,
    internal_calls=0,
    forced_requests=0,
    branches=0,
    branches_diverged=0,
    open=True,
    changing=False,
    asleep=False,
    behind=None,
    calls=CallCounts(0, 0, 0),
    export_trouble=None,
    token_digest=None,
)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """A state with the usual values of what it leaves out."""
    policies = state.get("policies", {})
    if isinstance(policies, dict):
        policies = {name: {**asdict(_POLICY), **policy} for name, policy in policies.items()}
    return {**USUAL.as_json(), "token_digest": token_digest(), **state, "policies": policies} if state else {}


@contextmanager
def policy_server(*answers: tuple[int, dict[str, Any]], port: int = 0) -> Iterator[PolicyServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, self.headers["Authorization"], body))
            status, answer = server.answers[min(len(server.asked), len(server.answers)) - 1]
            if status == 409:
                server.on_refusal()
            if status == 200 and self.path == "/trainspan/policy" and server.state:
                server.state |= body
            self._answer(status, answer)

        def do_GET(self) -> None:
            server.silent, is_silent = max(0, server.silent - 1), server.silent > 0
            self._answer(502 if is_silent else 200, whole(server.state))

        def _answer(self, status: int, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status == 302:
                self.send_header("Location", answer["Location"])
            if status == 503:
                self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server = PolicyServer(f"http://127.0.0.1:{http.server_port}", list(answers))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
