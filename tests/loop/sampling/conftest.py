"""What the tests of samplers share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainspan_loop.sampling.sampler import Sampler
from trainspan_loop.state.task_pool import TaskPool


@pytest.fixture
def one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskPool:
    """A pool of one task, in a home without runs."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "a", "input": "1"}\n')
    return TaskPool(tasks, "train")


@pytest.fixture
def opened() -> Iterator[list[Sampler]]:
    """Samplers that are ended after the test."""
    samplers: list[Sampler] = []
    yield samplers
    for sampler in samplers:
        sampler.stop()
        sampler.close()
