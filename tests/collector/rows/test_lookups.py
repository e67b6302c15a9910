"""Attributes that anybody may have sent."""

import pytest

from trainspan_collector.otlp.lookups import first_text
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
