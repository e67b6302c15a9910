"""What a swap waits for, and for how long: endless bodies, slow generations, requests that do not use the weights."""

import contextlib
import json
import re
import secrets
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.support.servers import Faulty, Models, publish_base
from tests.support.policy_server.process import RunningServer
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import TraceParent

KEY = {"Authorization": "Bearer sesame"}
PROMPT = [5] * 100
COMPLETION = {"model": "policy", "prompt": PROMPT, "max_tokens": 3}
LONG = {"model": "policy", "max_tokens": 900, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "calc 7"}]
ENDLESS = [{"role": "user", "content": "7*5"}]


@pytest.fixture
def served(faulty: Faulty, models: Models) -> Iterator[Faulty]:
    """A server with version 0 in service before and after."""
    server, _, checkpoints = faulty
    publish_base(models, checkpoints)
    yield faulty
    if server.policy()["version"] != 0:
        assert server.swap("policy-000000", 0)[0] == 200


def head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "Authorization: Bearer sesame", "", ""]).encode()


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        yield connection


def answers(connection: socket.socket, count: int = 1) -> list[int]:
    """Returns the statuses of `count` responses; fewer if the connection ends."""
    data = b""
    while data.count(b"HTTP/1.1 ") < count and (part := connection.recv(65536)):
        data += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_endless_bodies_do_not_delay_a_swap_and_get_408(served: Faulty, path: str) -> None:
    server, _, _ = served
    with connected(server) as announced, connected(server) as chunked:
        announced.sendall(head(path, "Content-Length: 1000") + b'{"model"')
        chunked.sendall(head(path, "Transfer-Encoding: chunked") + b'2\r\n{"\r\n')
        status, answer = server.swap("policy-000001", 1)
        assert (status, answer["canary"]["status"]) == (200, "fresh")
        assert answer["seconds"]["drain"] < 0.5
        assert server.policy()["in_flight"] == 0
        chunked.sendall(b"1\r\nm\r\n")
        assert (answers(announced), answers(chunked)) == ([408], [408])
        for connection in (announced, chunked):
            while connection.recv(65536):  # until it is closed
                pass
    assert server.policy()["requests_ended"] == 0


def test_a_slow_body_is_answered_by_the_weights_in_service_when_it_is_complete(
    served: Faulty,
) -> None:
    server, _, _ = served
    body = json.dumps(COMPLETION).encode()
    with connected(server) as connection:
        connection.sendall(head("/v1/completions", f"Content-Length: {len(body)}", "Connection: close") + body[:20])
        assert server.swap("policy-000001", 1)[0] == 200
        connection.sendall(body[20:])
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert f"{keys.HEADER_POLICY_VERSION}: 1".encode() in answer


def test_a_body_is_requested_by_100_unless_it_is_too_long_or_the_key_is_wrong(served: Faulty) -> None:
    server, _, _ = served
    body = json.dumps(COMPLETION).encode()
    expecting = "Expect: 100-continue"
    with connected(server) as connection:
        connection.sendall(head("/v1/completions", f"Content-Length: {len(body)}", expecting))
        assert answers(connection) == [100]
        connection.sendall(body)
        assert answers(connection) == [200]
    with connected(server) as connection:
        connection.sendall(head("/v1/completions", "Content-Length: 200001", expecting))
        assert answers(connection) == [413]
    with connected(server) as connection:
        wrong = head("/v1/completions", f"Content-Length: {len(body)}", expecting).replace(b"sesame", b"guess")
        connection.sendall(wrong)
        assert answers(connection) == [401]


def test_a_client_that_disconnects_during_its_body_leaves_nothing_behind(served: Faulty) -> None:
    server, _, _ = served
    before = server.policy()
    with connected(server) as connection:
        connection.sendall(head("/v1/completions", "Content-Length: 1000") + b"{")
    with connected(server) as connection:
        connection.sendall(head("/v1/completions", "Transfer-Encoding: chunked") + b"zz\r\n")
        assert answers(connection) == [400]
    after = server.policy()
    assert (after["in_flight"], after["calls_captured"]) == (0, before["calls_captured"])


def test_pipelined_requests_are_answered_in_their_order(served: Faulty) -> None:
    server, _, _ = served
    body = json.dumps(COMPLETION).encode()
    one = head("/v1/completions", f"Content-Length: {len(body)}") + body
    with connected(server) as connection:
        connection.sendall(one + head("/tokenize", "Content-Length: 2") + b"{}" + one)
        assert answers(connection, 3) == [200, 400, 200]
    assert server.policy()["in_flight"] == 0


def stream(server: RunningServer, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
    request = urllib.request.Request(
        server.url + path,
        json.dumps({**body, "stream": True}).encode(),
        {**headers, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, answer.read().decode()


def test_requests_that_outlast_the_drain_timeout_are_ended_with_the_reason_in_every_protocol(served: Faulty) -> None:
    server, sink, _ = served
    before = server.policy()["requests_ended"]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**LONG, "prompt": PROMPT, "n": 16}),
        ("/v1/chat/completions", {**LONG, "messages": MESSAGES}),
        ("/v1/responses", {"model": "policy", "input": "calc", "max_output_tokens": 900, "ignore_eos": True}),
        # This protocol has no `ignore_eos`: greedy decoding of this prompt does not end before 900 tokens.
        ("/v1/messages", {"model": "policy", "max_tokens": 900, "messages": ENDLESS, "temperature": 0}),
    ]
    parents = [TraceParent(secrets.token_hex(16), secrets.token_hex(8)) for _ in range(2 * len(asked))]
    traced = [{**KEY, "traceparent": str(parent)} for parent in parents]
    with ThreadPoolExecutor(2 * len(asked)) as pool:
        whole = [
            pool.submit(server.post, path, body, headers) for (path, body), headers in zip(asked, traced, strict=False)
        ]
        streamed = [
            pool.submit(stream, server, path, body, headers)
            for (path, body), headers in zip(asked, traced[len(asked) :], strict=True)
        ]
        wait_until(lambda: server.policy()["in_flight"] == len(traced))
        time.sleep(0.3)  # each is generating by now
        status, answer = server.swap("policy-000001", 1)
        assert (status, answer["canary"]["status"]) == (200, "fresh"), answer
        assert 0.5 < answer["seconds"]["drain"] < 5
        reason = "ended this request after waiting 0.6 s for it, because version 1 of the weights is being loaded"
        for (path, _), done in zip(asked, whole, strict=True):
            status, reply, headers = done.result()
            assert (status, headers.get("retry-after")) == (503, "1"), path
            assert reason in reply["error"]["message"], path
        for (path, _), ended in zip(asked, streamed, strict=True):
            status, text = ended.result()
            assert (status, reason in text) == (200, True), (path, text[-500:])
    state = server.policy()
    assert (state["requests_ended"] - before, state["in_flight"], state["version"]) == (len(traced), 0, 1)
    traces = {parent.trace_id for parent in parents}
    spans = sink.wait(15 + len(traced), lambda span: span.trace_id in traces)
    for span in spans:
        assert span.attributes[keys.GEN_AI_FINISH_REASONS] == [keys.ENDED_BY_SERVER]
        assert (span.attributes[keys.CALL_DELIVERED], span.status) == (False, 2)
        assert span.attributes[keys.POLICY_VERSION] == 0
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as metrics:
        assert f"trainspan_requests_ended_by_server_total {state['requests_ended']}.0" in metrics.read().decode()
    assert server.post("/v1/completions", COMPLETION, KEY)[2][keys.HEADER_POLICY_VERSION] == "1"


def test_requests_that_only_tokenize_are_answered_while_weights_change(served: Faulty) -> None:
    server, _, _ = served
    statuses: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(server.post, "/v1/completions", {**LONG, "prompt": PROMPT, "n": 16}, KEY)
        wait_until(lambda: server.policy()["in_flight"] == 1)
        swap = pool.submit(server.swap, "policy-000001", 1)
        wait_until(lambda: not server.policy()["open"])
        while not server.policy()["open"]:
            statuses.append(server.post("/tokenize", {"model": "policy", "prompt": "calc"}, KEY)[0])
        assert (swap.result()[0], long.result()[0]) == (200, 503)
    assert statuses
    assert set(statuses) == {200}


def test_of_two_concurrent_swaps_one_gets_busy(served: Faulty) -> None:
    server, _, _ = served
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(server.post, "/v1/completions", {**LONG, "prompt": PROMPT, "n": 16}, KEY)
        wait_until(lambda: server.policy()["in_flight"] == 1)
        swap = pool.submit(server.swap, "policy-000001", 1)
        wait_until(lambda: not server.policy()["open"])
        token = (server.home / "token").read_text().strip()
        order = {"checkpoint": "policy-000001", "version": 1}
        status, reply, headers = server.post("/trainspan/policy", order, {"Authorization": f"Bearer {token}"})
        assert (status, reply["reason"], headers["retry-after"]) == (503, "busy", "1")
        assert "another swap, sleep or wake request is in progress" in reply["error"]
        assert (swap.result()[0], long.result()[0]) == (200, 503)


def test_a_checkpoint_that_does_not_load_is_not_a_canary_verdict(served: Faulty) -> None:
    server, _, checkpoints = served
    (checkpoints.parent / "fault").write_text("broken load")
    try:
        status, answer = server.swap("policy-000001", 1)
    finally:
        (checkpoints.parent / "fault").unlink()
    assert (status, answer["reason"]) == (500, "load_failed")
    assert "loading policy-000001 failed: " in answer["error"]
    assert (server.policy()["version"], server.policy()["open"]) == (0, True)
    assert server.post("/v1/completions", COMPLETION, KEY)[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("policy.example", 200), ("POLICY.example:8000", 200), ("other.example", 400), ("policy.example.evil", 400)],
)
def test_a_swap_through_a_host_name_is_accepted_if_the_name_is_listed(served: Faulty, host: str, status: int) -> None:
    server, _, _ = served
    code, answer = server.swap("policy-000001", 1, Host=host)
    assert code == status, answer
    if status == 400:
        assert answer["error"] == (
            f"Host {host!r} is not this server: use an address or localhost, or list it in [serving] allowed_hosts"
        )
        assert server.policy()["version"] == 0
