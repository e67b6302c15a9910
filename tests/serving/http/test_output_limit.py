"""Requests that ask for more tokens than the context holds."""

import json

import pytest

from trainspan_serving.http.output_limit import limited


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
    body, found = limited(json.dumps(request_).encode(), request_, 4096)
    assert (json.loads(body), found) == (fitting, asked)
