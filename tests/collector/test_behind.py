"""Reads of a store that has not loaded what it acknowledged: they say so, and the dataset is not made of half of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.collector import CollectorProcess, export, get, span
from tests.support.faults import hanging_loader
from trainspan_processing import source
from trainspan_processing.source import Selection, Source
from trainspan_schemas.errors import StoreError


@pytest.fixture
def lagging(tmp_path: Path) -> Iterator[CollectorProcess]:
    """A collector that acknowledged two spans, of which none is loaded."""
    collector = CollectorProcess(tmp_path / "spans.duckdb", faults=hanging_loader(tmp_path / "faults"))
    export(collector.address, span(1, 1), span(1, 2))
    yield collector
    collector.kill()


def test_a_wait_that_is_over_gives_what_is_there_and_how_far_it_came(lagging: CollectorProcess) -> None:
    table = get(lagging.address, {"read": "spans", "wait_ms": 200})
    assert table.num_rows == 0
    assert table.schema.metadata == {b"watermark": b"0", b"behind": b"true"}


def test_a_dataset_is_refused_unless_it_is_allowed_to_be_behind(
    lagging: CollectorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "WAIT_MS", 200)
    for allow_behind in (False, True):
        with Source([str(lagging.store)], allow_behind=allow_behind) as opened:
            rows = opened.read("spans", Selection(), ["seq"])
            if allow_behind:
                assert sum(frame.height for frame in rows) == 0
            else:
                with pytest.raises(StoreError, match="not loaded all that it acknowledged"):
                    list(rows)
