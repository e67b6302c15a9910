"""A clean context for tests that enter blocks in their own process."""

from collections.abc import Iterator

import pytest
from opentelemetry import context
from opentelemetry.context import Context

from trainspan import _guard

UNASKED_URL = "http://127.0.0.1:9/v1"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A policy that nobody asks, and a context without the blocks of other tests."""
    monkeypatch.setenv("OPENAI_BASE_URL", UNASKED_URL)
    _guard.faults.clear()
    before = context.attach(Context())
    yield
    context.detach(before)
