"""No client chooses the id of a response."""

import json
from typing import Any

import pytest

from trainspan_serving.http.response_ids import with_own_response_id


def _asked(path: str, body: bytes) -> tuple[str, bytes]:
    """The `X-Request-Id` and the body that vLLM gets."""
    scope: dict[str, Any] = {"path": path, "headers": [(b"x-request-id", b"chosen"), (b"accept", b"*/*")]}
    passed = with_own_response_id(scope, body)
    (request_id,) = [value.decode() for name, value in scope["headers"] if name == b"x-request-id"]
    assert (b"accept", b"*/*") in scope["headers"]
    return request_id, passed


def test_the_header_is_random_and_other_bodies_stay_as_they_are() -> None:
    body = b'{"request_id": "chosen"}'
    first, second = (_asked("/v1/chat/completions", body) for _ in range(2))
    assert (first[1], second[1]) == (body, body)  # vLLM prefers the header
    assert len({first[0], second[0], "chosen"}) == 3


@pytest.mark.parametrize("key", ["request_id", "request\\u005fid"])
def test_a_choice_in_the_body_of_a_response_is_left_out(key: str) -> None:
    _, passed = _asked("/v1/responses", f'{{"input": "ä", "{key}": "chosen"}}'.encode())
    assert json.loads(passed) == {"input": "ä"}


@pytest.mark.parametrize("body", [b"", b"not JSON", b'["request_id"]', b'{"input": "x"}', b"[" * 100_000])
def test_a_body_without_a_choice_is_passed_on_unchanged(body: bytes) -> None:
    assert _asked("/v1/responses", body)[1] == body
