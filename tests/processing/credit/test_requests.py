"""Which calls of a rollout are steps of it."""

from typing import Any

import polars as pl

from trainspan_processing.credit.groups import with_requests

TYPES = {
    "rollout": pl.UInt32,
    "server": pl.String,
    "counted_index": pl.Int32,
    "response_id": pl.String,
    "span_id": pl.String,
    "delivered": pl.Boolean,
    "internal": pl.Boolean,
    "call_kind": pl.String,
}


def numbers(*calls: dict[str, Any]) -> list[int]:
    facts: dict[str, Any] = {"rollout": 0, "server": "s", "response_id": None, "call_kind": "main"}
    rows = [facts | {"span_id": str(place), "counted_index": place} | call for place, call in enumerate(calls)]
    return with_requests(pl.DataFrame(rows, schema=TYPES)).get_column("request").to_list()


def test_choices_of_a_request_share_its_number_whoever_recorded_them() -> None:
    by_server = [{"counted_index": index} for index in (0, 0, 0, 1, 2, 2)]
    assert numbers(*by_server) == [1, 1, 1, 2, 3, 3]
    by_client = [{"counted_index": None, "server": None, "response_id": name} for name in ("a", "a", "b", None, None)]
    assert numbers(*by_client) == [1, 1, 2, 3, 4]
    assert numbers({"server": "s", "counted_index": 0}, {"server": "t", "counted_index": 0}) == [1, 2]
    assert numbers({}, {}, {"rollout": 1, "counted_index": 1}, {"rollout": 1, "counted_index": 1}) == [1, 2, 1, 1]


def test_titles_lost_answers_and_calls_of_our_own_are_no_steps() -> None:
    title, lost, ours = {"call_kind": "title"}, {"delivered": False}, {"internal": True}
    assert numbers(title, {}, title, {}, lost, {}, ours, title) == [0, 1, 1, 2, 2, 3, 3, 3]
    assert numbers({"call_kind": None, "delivered": None, "internal": None}, {}) == [1, 2]
