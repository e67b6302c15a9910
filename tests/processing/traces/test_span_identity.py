"""Which spans in frames are copies of the same one."""

import polars as pl

from trainspan_processing.tables import each_once


def test_a_span_is_known_by_its_trace_and_its_own_id() -> None:
    keys = [("t1", "a"), ("t1", "b"), ("t2", "a"), ("t1", "a")]
    spans = pl.DataFrame(
        [(*key, place) for place, key in enumerate(keys)], schema=["trace_id", "span_id", "place"], orient="row"
    )
    assert each_once(spans)["place"].to_list() == [0, 1, 2]
    assert each_once(spans[:2]).equals(spans[:2])
