from collections.abc import Iterator

import pytest

from tests.support.collector.process import ANY_PORT, CollectorProcess, running


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """One collector for all tests of a module: each test uses its own trace and rollout ids."""
    with running(tmp_path_factory.mktemp("store") / "spans.duckdb", http=ANY_PORT) as started:
        yield started
