"""Which spans in frames are copies of the same one."""

import polars as pl
import pytest

from trainspan_processing.tables import each_once, once_each


def test_a_span_is_known_by_its_trace_and_its_own_id() -> None:
    keys = [("t1", "a"), ("t1", "b"), ("t2", "a"), ("t1", "a")]
    spans = pl.DataFrame(
        [(*key, place, None) for place, key in enumerate(keys)],
        schema={"trace_id": pl.String, "span_id": pl.String, "place": pl.Int64, "untrusted": pl.Boolean},
        orient="row",
    )
    assert each_once(spans)["place"].to_list() == [0, 1, 2]
    assert each_once(spans[:2]).equals(spans[:2])


def test_the_trusted_copy_counts_whatever_the_order_of_the_stores() -> None:
    """An agent can send a copy of its runner's span to the collector of other rollouts."""
    spans = pl.DataFrame(
        [
            ("forged", 0, "t", "1", True),
            ("own", 0, "t", "2", True),
            ("runner's", 1, "t", "1", False),
            ("again", 1, "t", "2", True),
            ("unknown", 1, "t", "3", None),
            ("late", 2, "t", "3", True),
        ],
        schema=["what", "store", "trace_id", "span_id", "untrusted"],
        orient="row",
    )
    assert each_once(spans)["what"].to_list() == ["own", "runner's", "unknown"]
    assert each_once(spans.reverse())["what"].to_list() == ["unknown", "again", "runner's"]


@pytest.mark.parametrize(
    ("kinds", "collides"),
    [
        ((3, 2), False),  # CLIENT and SERVER share a span as two halves
        ((4, 5), False),  # PRODUCER and CONSUMER
        ((3, 2, 2), False),
        ((3, 3, 2), True),  # of two spans of the client
        ((3, 3), True),
        ((3, 5), True),
        ((1, 2), True),
        ((2, 3, 0), True),
    ],
)
def test_two_halves_of_one_span_in_two_stores_are_no_collision(kinds: tuple[int, ...], collides: bool) -> None:
    starts = [0 if kind == 2 else (1 + place) * 1_000_000 for place, kind in enumerate(kinds)]
    spans = pl.DataFrame({"start_ns": starts, "kind": kinds}).with_columns(
        pl.lit(value).alias(name)
        for name, value in (("trace_id", "t"), ("span_id", "s"), ("parent_span_id", "p"), ("rollout_id", "r"))
    )
    spans = spans.with_columns(attempt=0, untrusted=False, boundary=None, status=None)
    once, collisions = once_each(spans)
    assert once.height == 1
    assert collisions.rows() == ([("t", False)] if collides else [])
