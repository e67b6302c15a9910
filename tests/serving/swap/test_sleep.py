"""One accelerator for trainer and server: the server sleeps while the trainer works. On a CPU, vLLM has no memory to
free; everything else is the same."""

import threading
import time
from typing import Any

import pytest

from tests.serving.support.servers import Models, Stack
from tests.serving.support.traffic import LONG_PROMPT, greedy
from tests.support.models.canary import greedy_ids
from trainspan_loop.clients.policy_server import PolicyClient
from trainspan_schemas.errors import PolicyServerError
from trainspan_schemas.telemetry import keys

pytestmark = pytest.mark.usefixtures("base_policy")


def order(stack: Stack, what: str, **headers: str) -> tuple[int, dict[str, Any]]:
    token = (stack.server.home / "token").read_text().strip()
    given = {"Authorization": f"Bearer {token}", **headers}
    status, answer, _ = stack.server.post(f"/trainspan/{what}", {}, given)
    return status, answer


def test_a_sleeping_server_holds_requests_and_answers_them_when_it_wakes(stack: Stack, models: Models) -> None:
    before = greedy(stack.server)
    assert order(stack, "sleep") == (200, {"asleep": True, "version": 0})
    assert order(stack, "sleep") == (200, {"asleep": True, "version": 0})
    state = stack.server.policy()
    assert (state["asleep"], state["open"], state["in_flight"]) == (True, False, 0)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(greedy(stack.server)))
    thread.start()
    time.sleep(0.5)
    assert not answers
    assert order(stack, "wake") == (200, {"asleep": False, "version": 0})
    thread.join(30)
    assert answers == [before]
    assert order(stack, "wake") == (200, {"asleep": False, "version": 0})


def test_the_loop_puts_it_to_sleep_and_wakes_it(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(stack.server.home))
    client = PolicyClient(stack.server.url)
    client.sleep()
    assert client.state().asleep is True
    client.wake()
    assert client.state().asleep is False
    monkeypatch.setenv("TRAINSPAN_HOME", str(stack.server.home / "other"))
    with pytest.raises(PolicyServerError, match="answered /trainspan/sleep with 401"):
        client.sleep()


def test_it_waits_for_requests_in_flight_before_it_sleeps(stack: Stack) -> None:
    body = {"model": "policy", "prompt": LONG_PROMPT, "max_tokens": 400, "ignore_eos": True}
    answers: list[tuple[int, Any, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(stack.server.post("/v1/completions", body)))
    thread.start()
    while stack.server.policy()["in_flight"] == 0:
        time.sleep(0.005)
    assert order(stack, "sleep")[0] == 200
    thread.join(30)
    assert order(stack, "wake")[0] == 200
    ((status, reply, _),) = answers
    assert (status, reply["usage"]["completion_tokens"]) == (200, 400)


def test_a_swap_wakes_it_with_the_new_weights(stack: Stack, models: Models) -> None:
    assert order(stack, "sleep")[0] == 200
    status, answer = stack.server.swap("policy-000001", 1)
    assert (status, answer["canary"]["status"]) == (200, "fresh")
    state = stack.server.policy()
    assert (state["asleep"], state["open"], state["version"]) == (False, True, 1)
    assert greedy(stack.server) == (greedy_ids(models.folder(1), LONG_PROMPT, 12), "1")


def test_a_refused_checkpoint_leaves_it_asleep(stack: Stack) -> None:
    assert order(stack, "sleep")[0] == 200
    assert stack.server.swap("policy-999999", 9)[0] == 404
    assert stack.server.policy()["asleep"] is True
    assert order(stack, "wake")[0] == 200
    assert greedy(stack.server, 4)[1] == "0"


def test_strangers_and_other_methods_are_refused(stack: Stack) -> None:
    assert order(stack, "sleep", Authorization="Bearer wrong")[0] == 401
    assert order(stack, "nap")[0] == 404
    status, _, headers = stack.server.post("/v1/completions", {"model": "policy", "prompt": "x", "max_tokens": 1})
    assert (status, headers[keys.HEADER_POLICY_VERSION]) == (200, "0")
