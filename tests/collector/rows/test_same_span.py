"""Copies of one span, and distinct spans with the same ids."""

import shutil
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.collector.filling import Store
from tests.support.collector.process import Attribute, span
from trainspan_collector.rows.same_span import SpanFacts, are_distinct
from trainspan_schemas.telemetry import keys

FACTS = SpanFacts(5_000, 9_000, "p", "name", 1, "r", 0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, False),
        ({"start_ns": 5_999, "end_ns": 9_999}, False),  # a protocol in microseconds
        ({"end_ns": 0, "name": "before it was known"}, False),
        ({"rollout_id": None, "attempt": None}, False),
        ({"kind": 2}, True),
        ({"start_ns": 6_000}, True),
        ({"parent_span_id": None}, True),
        ({"name": "other"}, True),
        ({"rollout_id": "s"}, True),
        ({"attempt": 1}, True),
    ],
)
def test_spans_with_the_same_ids_are_copies_unless_they_differ_in_what_no_copy_changes(
    change: dict[str, object], expected: bool
) -> None:
    change = {"start_ns": 8_000, **change} if change == {"kind": 2} else change
    other = FACTS._replace(**change)
    assert are_distinct(FACTS, other) is expected
    assert are_distinct(other, FACTS) is expected


def test_the_client_and_the_server_may_share_a_span() -> None:
    client, server = FACTS._replace(kind=3), FACTS._replace(kind=2, start_ns=6_000, name="its own")
    assert not are_distinct(client, server)


def _rollout(number: int, start_ns: int) -> Span:
    said: dict[str, Attribute] = {keys.ROLLOUT_ID: f"r{number}", keys.ROLLOUT_STATUS: "ok"}
    return span(1, 1, said, start_time_unix_nano=start_ns, end_time_unix_nano=start_ns + 10)


@pytest.mark.parametrize("batches", [[[1, 2, 3]], [[1], [2], [3]], [[1, 2], [3, 1]], [[2], [1, 2], [3]]])
def test_distinct_spans_with_one_id_are_all_stored_once(tmp_path: Path, batches: list[list[int]]) -> None:
    store = Store(tmp_path)
    try:
        for _ in range(2):  # sent again
            for numbers in batches:
                store.filling.add_spans([_rollout(number, 1_000_000 * number) for number in numbers])
        found = store.filling.cursor.execute(
            "SELECT rollout_id, collides FROM stored.live_spans ORDER BY seq"
        ).fetchall()
        assert sorted(name for name, _ in found) == ["r1", "r2", "r3"]
        assert [collides for _, collides in found] == [None, True, True]
        assert store.differences() == (0, 0)
        store.close()
        shutil.rmtree(store.keys)  # it is rebuilt from the store
        store.open()
        store.filling.add_spans([_rollout(number, 1_000_000 * number) for number in (3, 2, 1)])
        assert store.filling.cursor.execute("SELECT count(*) FROM stored.live_spans").fetchall() == [(3,)]
    finally:
        store.close()


@pytest.mark.parametrize("batches", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_colliding_spans_within_a_microsecond_are_copies_however_they_arrive(
    tmp_path: Path, batches: list[int]
) -> None:
    """Of these the last one stays."""
    spans = [
        span(1, 1, {"copy": number}, start_time_unix_nano=at, end_time_unix_nano=at + 10)
        for number, at in enumerate((10**6, 2 * 10**6, 2_000_400))
    ]
    store = Store(tmp_path)
    try:
        for count in batches:
            store.filling.add_spans([spans.pop(0) for _ in range(count)])
        stored = store.filling.cursor.execute(
            "SELECT start_ns // 1000, collides, attributes FROM stored.live_spans ORDER BY 1"
        )
        assert stored.fetchall() == [(1000, None, '{"copy":0}'), (2000, True, '{"copy":2}')]
        assert store.differences() == (0, 0)
    finally:
        store.close()


def test_a_kind_that_no_specification_has_does_not_damage_the_index(tmp_path: Path) -> None:
    odd = span(1, 1, {}, start_time_unix_nano=5000, end_time_unix_nano=6000)
    odd.kind = -1  # type: ignore[assignment]
    store = Store(tmp_path)
    try:
        store.filling.add_spans([odd])
        assert store.differences() == (0, 0)
    finally:
        store.close()
