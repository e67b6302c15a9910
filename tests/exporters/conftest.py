"""A recording policy server and collector, for programs that run as agents."""

from collections.abc import Iterator

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.otlp.recorder import OtlpRecorder


@pytest.fixture
def policy() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        yield server


@pytest.fixture
def recorder() -> Iterator[OtlpRecorder]:
    with OtlpRecorder() as recorder:
        yield recorder


@pytest.fixture
def wired(policy: OpenAIServer, recorder: OtlpRecorder) -> dict[str, str]:
    """Returns the environment of an agent that uses both."""
    return {
        "OPENAI_BASE_URL": policy.url,
        "OPENAI_API_KEY": "key",
        "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint,
    }
