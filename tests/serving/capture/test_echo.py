"""Which requests get no sampled token."""

import pytest

from trainspan_serving.capture.echo import only_echoes


@pytest.mark.parametrize("body", [b'{"echo": true, "max_tokens": 0}', b'{"echo": 1, "max_tokens": "0"}'])
def test_an_echo_of_the_prompt_alone(body: bytes) -> None:
    assert only_echoes("/v1/completions", body)
    assert not only_echoes("/v1/chat/completions", body)


@pytest.mark.parametrize(
    "body", [b"", b"[0]", b"{}", b'{"max_tokens": null}', b'{"echo": true, "max_tokens": 1}', b'{"max_tokens": "x"}']
)
def test_any_other_request(body: bytes) -> None:
    assert not only_echoes("/v1/completions", body)
