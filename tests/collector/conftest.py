from collections.abc import Iterator

import pytest

from tests.support.collector import ANY_PORT, CollectorProcess, running


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """One collector for all tests of a module: each uses trace ids and rollout ids of its own."""
    with running(tmp_path_factory.mktemp("store") / "spans.duckdb", http=ANY_PORT) as started:
        yield started
