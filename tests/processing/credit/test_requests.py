"""Which calls of a rollout are steps of it."""

from typing import Any

import polars as pl

from trainspan_processing.credit.groups import with_requests

TYPES = {
    "rollout": pl.UInt32,
    "server": pl.String,
    "counted_index": pl.Int32,
    "start_ns": pl.Int64,
    "response_id": pl.String,
    "trace_id": pl.String,
    "span_id": pl.String,
    "delivered": pl.Boolean,
    "internal": pl.Boolean,
    "call_kind": pl.String,
}


def numbers(*calls: dict[str, Any]) -> list[int]:
    facts: dict[str, Any] = {"rollout": 0, "server": "s", "start_ns": 0, "trace_id": "t", "call_kind": "main"}
    rows = [facts | {"span_id": str(place), "counted_index": place} | call for place, call in enumerate(calls)]
    return with_requests(pl.DataFrame(rows, schema=TYPES)).get_column("request").to_list()


def test_choices_of_a_request_share_its_number_whoever_recorded_them() -> None:
    by_server = [{"counted_index": index} for index in (0, 0, 0, 1, 2, 2)]
    assert numbers(*by_server) == [1, 1, 1, 2, 3, 3]
    by_client = [{"counted_index": None, "server": None, "response_id": name} for name in ("a", "a", "b", None, None)]
    assert numbers(*by_client) == [1, 1, 2, 3, 4]
    assert numbers({"server": "s", "counted_index": 0}, {"server": "t", "counted_index": 0}) == [1, 2]
    assert numbers({}, {}, {"rollout": 1, "counted_index": 1}, {"rollout": 1, "counted_index": 1}) == [1, 2, 1, 1]


def test_calls_of_a_caller_whom_the_server_does_not_know_are_requests_of_their_own() -> None:
    """They all have index 0."""
    assert numbers(*({"counted_index": 0, "start_ns": at} for at in (10, 20, 20, 30))) == [1, 2, 2, 3]


def test_a_choice_that_did_not_arrive_divides_no_request() -> None:
    assert numbers(*({"counted_index": 0, "delivered": at != 1} for at in range(3)), {}) == [1, 1, 1, 2]


def test_titles_lost_answers_and_calls_of_our_own_are_no_steps() -> None:
    title, lost, ours = {"call_kind": "title"}, {"delivered": False}, {"internal": True}
    assert numbers(title, {}, title, {}, lost, {}, ours, title) == [0, 1, 1, 2, 2, 3, 3, 3]
    assert numbers({"call_kind": None, "delivered": None, "internal": None}, {}) == [1, 2]
