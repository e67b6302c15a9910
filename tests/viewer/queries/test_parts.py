"""A part of the rows of several stores, which follow each other."""

from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest

from trainspan_processing.read.source import Selection
from trainspan_viewer.queries.requests.parts import part_of


class Stores:
    """A source whose stores have so many rows each, numbered throughout."""

    def __init__(self, *heights: int) -> None:
        self.stores = [f"store-{number}" for number in range(len(heights))]
        starts = [sum(heights[:number]) for number in range(len(heights))]
        self.rows = [list(range(start, start + height)) for start, height in zip(starts, heights, strict=True)]

    def read(
        self, name: str, selection: Selection, columns: list[str], *, store: int, rows: int, skip: int = 0
    ) -> Iterator[pl.DataFrame]:
        found = self.rows[store][skip : skip + rows]
        if found:
            yield pl.DataFrame({"number": found, "n_selected": [len(self.rows[store])] * len(found)})


@pytest.mark.parametrize("heights", [(5,), (3, 4), (0, 4), (4, 0, 3), (1, 1, 1), (0, 0)])
def test_every_part_is_that_of_all_rows_after_another(heights: tuple[int, ...]) -> None:
    source: Any = Stores(*heights)
    everything = list(range(sum(heights)))
    for start in range(sum(heights) + 2):
        for most in range(1, sum(heights) + 2):
            part, total = part_of(source, "spans", Selection(), ["number"], start=start, most=most)
            assert (part["number"].to_list() if part.width else []) == everything[start : start + most]
            assert total == sum(heights)
