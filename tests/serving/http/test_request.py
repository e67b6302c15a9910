"""What vLLM gets of a request, and which requests get no sampled token."""

import json
from typing import Any

import pytest

from trainspan_serving.http.body import check_json
from trainspan_serving.http.request import only_echoes, rewritten


def _asked(path: str, body: bytes, kind: bytes = b"application/json") -> tuple[str, bytes, int | None]:
    """The `X-Request-Id` and the body that vLLM gets, and how many tokens the client asked for."""
    headers = [(b"x-request-id", b"chosen"), (b"accept", b"*/*"), (b"content-type", kind)]
    scope: dict[str, Any] = {"path": path, "headers": headers}
    passed, asked = rewritten(scope, body, check_json(scope, body), 4096)
    (request_id,) = [value.decode() for name, value in scope["headers"] if name == b"x-request-id"]
    assert (b"accept", b"*/*") in scope["headers"]
    return request_id, passed, asked


def test_the_header_is_random_and_other_bodies_stay_as_they_are() -> None:
    body = b'{"request_id": "chosen"}'
    first, second = (_asked("/v1/chat/completions", body) for _ in range(2))
    assert (first[1], second[1]) == (body, body)  # vLLM prefers the header
    assert len({first[0], second[0], "chosen"}) == 3


@pytest.mark.parametrize("key", ["request_id", "request\\u005fid"])
def test_a_choice_in_the_body_of_a_response_is_left_out(key: str) -> None:
    body = f'{{"input": "ä", "max_output_tokens": 9000, "{key}": "chosen"}}'.encode()
    assert json.loads(_asked("/v1/responses", body)[1]) == {"input": "ä", "max_output_tokens": 4096}


@pytest.mark.parametrize("body", [b"", b" ", b'{"input":"x",  "max_output_tokens": 4096}', b'{"request_id": null}'])
def test_a_body_without_a_choice_is_passed_on_unchanged(body: bytes) -> None:
    assert _asked("/v1/responses", body)[1] == body


def test_a_body_of_another_type_is_left_to_vllm_which_refuses_it() -> None:
    body = b'{"request_id": "chosen", "max_output_tokens": 9000}'
    assert _asked("/v1/responses", body, b"text/plain")[1:] == (body, None)


@pytest.mark.parametrize(
    ("request_", "fitting", "asked"),
    [
        ({"max_tokens": 32000, "n": 2}, {"max_tokens": 4096, "n": 2}, 32000),
        ({"max_completion_tokens": 4097}, {"max_completion_tokens": 4096}, 4097),
        ({"max_output_tokens": 9000, "max_tokens": 100}, {"max_output_tokens": 4096, "max_tokens": 100}, 9000),
        ({"max_tokens": 4096}, {"max_tokens": 4096}, 4096),
        ({"max_tokens": None}, {"max_tokens": None}, None),
        ({"max_tokens": "many"}, {"max_tokens": "many"}, None),
        ({"max_tokens": True}, {"max_tokens": True}, None),
        ({}, {}, None),
    ],
)
def test_the_number_of_tokens_is_at_most_the_context(
    request_: dict[str, object], fitting: dict[str, object], asked: int | None
) -> None:
    _, body, stated = _asked("/v1/chat/completions", json.dumps(request_).encode())
    assert (json.loads(body), stated) == (fitting, asked)


@pytest.mark.parametrize("request_", [{"echo": True, "max_tokens": 0}, {"echo": 1, "max_tokens": "0"}])
def test_an_echo_of_the_prompt_alone(request_: dict[str, object]) -> None:
    assert only_echoes("/v1/completions", request_)
    assert not only_echoes("/v1/chat/completions", request_)


@pytest.mark.parametrize(
    "request_", [{}, {"max_tokens": None}, {"echo": True, "max_tokens": 1}, {"max_tokens": "x"}, {"max_tokens": [0]}]
)
def test_any_other_request(request_: dict[str, object]) -> None:
    assert not only_echoes("/v1/completions", request_)
