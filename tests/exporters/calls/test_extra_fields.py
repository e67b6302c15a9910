"""The fields that client capture adds to a request: when they are hidden, and when a server is no longer asked for them."""

import json
from typing import Any

import httpx
import pytest

from trainspan._calls import client_capture
from trainspan._calls.client_capture import ClientExchange
from trainspan._calls.openai_wire import question_of

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "given", "hidden"),
    [
        ("/v1/completions", None, True),
        ("/v1/completions", 0, False),  # the sampled token's alone
        ("/v1/completions", 3, False),
        (CHAT, None, True),
        (CHAT, False, True),
        (CHAT, True, False),
    ],
)
def test_log_probabilities_are_hidden_only_from_a_client_that_did_not_ask_for_them(
    path: str, given: Any, hidden: bool
) -> None:
    asked = {"model": "m"} if given is None else {"model": "m", "logprobs": given}
    question = question_of(path, json.dumps(asked).encode())
    assert question is not None
    assert question.hides_logprobs is hidden
    assert json.loads(question.content)["logprobs"] == (given or 0 if not hidden else (path == CHAT or 1))


@pytest.mark.parametrize(("again", "asked_later"), [(200, False), (400, True), (404, True)])
def test_a_server_is_asked_again_later_if_it_refused_the_clients_own_request_as_well(
    again: int, asked_later: bool
) -> None:
    def exchange() -> ClientExchange:
        original = httpx.Request("POST", "http://server" + CHAT, json={"model": "m"})
        question = question_of(CHAT, original.content)
        return ClientExchange(httpx, original, question, None, None, "http://server", CHAT)

    client_capture._refusing.clear()
    first = exchange()
    sent = first.outgoing()
    assert first.refused(sent, 400)
    first.resent(again)
    later = exchange()
    assert (later.outgoing() is not later.original) is asked_later
    client_capture._refusing.clear()
