import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.identity import Identity, TraceParent, parse_baggage, strip_identity

IDS = st.text(min_size=1, max_size=40)


@given(rollout=IDS, run=IDS, task=IDS, attempt=st.integers(0, 9), round_=st.none() | st.integers(0, 10**6))
def test_identity_survives_the_baggage_header(
    rollout: str, run: str, task: str, attempt: int, round_: int | None
) -> None:
    identity = Identity(rollout, run, task, attempt, round_, "val")
    header = identity.to_baggage(agent="plan,ner=1;x")
    assert header.isascii()
    assert Identity.from_attributes(parse_baggage(header)) == identity
    assert parse_baggage(header)["gen_ai.agent.name"] == "plan,ner=1;x"


def test_foreign_baggage_is_kept_and_ours_is_taken_out() -> None:
    header = "user=7;p=1," + Identity("r1").to_baggage("writer") + ", tenant=a%20b"
    assert strip_identity(header) == "user=7;p=1, tenant=a%20b"


def test_baggage_is_read_without_spaces_properties_and_malformed_members() -> None:
    assert parse_baggage(" user = 7 ;p=1 ,bare, =x,tenant=a%20b") == {"user": "7", "tenant": "a b"}


def test_half_characters_in_an_identity_are_escaped() -> None:
    halves = Identity("r\ud800", "n\udfff", "t\ud83d")
    assert halves == Identity("r\\ud800", "n\\udfff", "t\\ud83d")
    assert Identity.from_attributes(parse_baggage(halves.to_baggage())) == halves


def test_baggage_without_a_rollout_is_no_identity() -> None:
    assert Identity.from_attributes({"trainspan.run.id": "x"}) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (field, value)
            for field in ("attempt", "round")
            for value in ("seven", "-1", "1.5", "1_0", "٣", " 1", "", True)
        ],
        ("attempt", "1" * 23),
        ("attempt", 2**31),
        ("round", "9" * 5000),
        ("split", "test"),
        ("rollout.id", "x" * 4097),
        ("task.id", "x" * 4097),
    ],
)
def test_a_field_that_no_store_can_hold_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRecordError, match=f"trainspan.{field} "):
        Identity.from_attributes({"trainspan.rollout.id": "x", f"trainspan.{field}": value})


def test_the_largest_fields_are_an_identity() -> None:
    identity = Identity("x" * 4096, "r" * 4096, "t" * 4096, 2**31 - 1, 0)
    assert Identity.from_attributes(parse_baggage(identity.to_baggage())) == identity


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-0-0-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
    ],
)
def test_invalid_traceparents_are_refused(text: str) -> None:
    assert TraceParent.parse(text) is None


def test_a_traceparent_is_printed_as_it_was_read() -> None:
    text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    parsed = TraceParent.parse(text)
    assert parsed == TraceParent("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=False)
    assert str(parsed) == text


def test_a_client_that_writes_a_space_as_a_plus_loses_neither_identity_nor_signature() -> None:
    """OpenTelemetry for Python parses and reassembles baggage this way."""
    key = b"k" * 32
    signed = Identity("r 1+1", "run", "a task", 0, 3, "val").signed(key)
    again = signed.to_baggage().replace("%20", "+")
    assert "a+task" in again
    found = Identity.from_attributes(parse_baggage(again))
    assert found == signed
    assert found is not None
    assert found.is_signed(key)
