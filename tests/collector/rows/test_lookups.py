"""Attributes that anybody may have sent."""

import pytest

from trainspan_collector.otlp.lookups import first_text, identity
from trainspan_collector.otlp.values import Json


@pytest.mark.parametrize(
    ("value", "first"),
    [
        ('["stop", "length"]', "stop"),
        (["stop"], "stop"),
        ("stop", "stop"),
        ("[stop", "[stop"),
        (r'["\ud800"]', "\ufffd"),
        (r'["a\udfff\ud83d\ude00"]', "a\ufffd\U0001f600"),
        ("[]", None),
        ("[1]", None),
        ([], None),
        ("", None),
        (1, None),
    ],
)
def test_the_first_text_can_be_stored_whatever_was_sent(value: Json, first: str | None) -> None:
    found = first_text({"reasons": value}, "reasons")
    assert found == first
    assert found is None or found.encode()


@pytest.mark.parametrize(
    ("attempt", "found"),
    [
        (None, ("r1", None)),
        (2, ("r1", 2)),
        ("2", ("r1", 2)),
        (2.0, ("r1", 2)),
        (-1, (None, None)),
        (2**31, (None, None)),
        ("1" * 23, (None, None)),
        ("seven", (None, None)),
        (True, (None, None)),
    ],
)
def test_a_span_with_a_false_attempt_belongs_to_no_rollout_rather_than_to_the_first_attempt(
    attempt: Json, found: tuple[str | None, int | None]
) -> None:
    sent: dict[str, Json] = {"trainspan.rollout.id": "r1"}
    assert identity(sent if attempt is None else sent | {"trainspan.attempt": attempt}) == found
