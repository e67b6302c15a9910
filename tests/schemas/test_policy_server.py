"""What a policy server says of itself, and what is no state."""

import json
import re

import pytest

from tests.training.support.swap_server import USUAL, whole
from trainspan_schemas.policy_server import Offer, ServerState


def test_a_state_is_the_same_after_it_was_sent() -> None:
    body = json.dumps(whole({"version": 3, "policies": {"writer": {"version": 2}}, "calls_refused": 1})).encode()
    state = ServerState.parse(body)
    assert (state.alone.version, state.of("writer").version, state.calls.refused) == (3, 2, 1)
    assert (str(state), str(USUAL)) == ("writer version 2", "version 0")
    assert json.loads(body) == state.as_json()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"version": "3"}, "version is '3'"),
        ({"version": True}, "version is True"),
        ({"policies": ["writer"]}, "policies is ['writer'], not an object"),
        ({"policies": {"writer": 1}}, "1 is not an object"),
        ({"calls_captured": None}, "captured is None"),
        ({"behind": 1}, "behind is 1"),
    ],
)
def test_a_field_of_another_type_is_named(change: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(error)):
        ServerState.parse(json.dumps({**USUAL.as_json(), **change}).encode())


def test_a_field_that_is_missing_is_named() -> None:
    state = USUAL.as_json()
    del state["dtype"]
    with pytest.raises(ValueError, match="dtype is missing"):
        ServerState.parse(json.dumps(state).encode())


def test_an_offer_names_its_policy_only_on_a_server_with_several() -> None:
    offer = Offer("policy-000002", 2, "2b" * 32)
    assert Offer.parse(offer.to_json(None).encode()) == (offer, None)
    assert Offer.parse(offer.to_json("writer").encode()) == (offer, "writer")
    assert "policy" not in json.loads(offer.to_json(None))
