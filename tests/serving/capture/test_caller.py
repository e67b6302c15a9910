"""Identifying the caller by header, URL or key, and what vLLM still sees of the request."""

import dataclasses
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.clock import clock_id
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_serving.capture.caller import Caller, identify

TRACE = TraceParent("ab" * 16, "cd" * 8)
ELSEWHERE = TraceParent("ab" * 16, "ef" * 8)
OTHER = TraceParent("12" * 16, "34" * 8)
KEY = b"k" * 32


def scope_of(path: str = "/v1/chat/completions", **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"path": path, "raw_path": path.encode(), "headers": pairs}


def test_a_stranger_has_neither_trace_nor_identity() -> None:
    scope = scope_of(authorization="Bearer sk-1")
    assert identify(scope, [], KEY) == Caller(None, None, None)
    assert scope == scope_of(authorization="Bearer sk-1")


def test_the_headers_span_wins_over_the_urls_within_one_trace() -> None:
    scope = scope_of(f"/rollout/{TRACE}/v1/models", traceparent=str(ELSEWHERE))
    assert identify(scope, [], KEY).parent == ELSEWHERE
    assert (scope["path"], scope["raw_path"]) == ("/v1/models", b"/v1/models")


@pytest.mark.parametrize(
    "scope",
    [
        scope_of(f"/rollout/{TRACE}/v1/models", traceparent=str(OTHER)),
        scope_of(authorization=f"Bearer trainspan-{TRACE}", traceparent=str(OTHER)),
    ],
)
def test_an_agents_own_trace_yields_to_the_one_that_url_or_key_names_and_is_linked(scope: dict[str, Any]) -> None:
    caller = identify(scope, [], KEY)
    assert (caller.parent, caller.link) == (TRACE, OTHER)
    inside = identify(scope_of(traceparent=str(OTHER)), [], KEY)
    assert (inside.parent, inside.link) == (OTHER, None)


def test_url_and_key_of_two_rollouts_contradict_each_other() -> None:
    with pytest.raises(InvalidRecordError, match="names two rollouts"):
        identify(scope_of(f"/rollout/{TRACE}/v1/models", authorization=f"Bearer trainspan-{OTHER}"), [], KEY)


def test_an_identity_that_no_store_can_hold_is_refused() -> None:
    baggage = Identity("r1").to_baggage().replace("attempt=0", "attempt=" + "1" * 23)
    with pytest.raises(InvalidRecordError, match=r"trainspan\.attempt is '1{23}'; it must be a whole number from 0"):
        identify(scope_of(baggage=baggage), [], KEY)


@pytest.mark.parametrize("token", ["", "x", str(TRACE)[:-1], f"{TRACE}x", f"00-{'0' * 32}-{'1' * 16}-01"])
def test_a_url_without_a_traceparent_is_refused(token: str) -> None:
    with pytest.raises(InvalidRecordError, match="is not a traceparent"):
        identify(scope_of(f"/rollout/{token}/v1/models"), [], KEY)


def test_a_key_of_ours_never_reaches_vllm_and_its_secret_becomes_vllms_key() -> None:
    for name in ("authorization", "x_api_key"):
        prefix = "Bearer " if name == "authorization" else ""
        scope = scope_of(**{name: f"{prefix}trainspan-{TRACE}-top-secret"})
        assert identify(scope, ["other", "top-secret"], KEY).parent == TRACE
        assert scope["headers"] == [(b"authorization", b"Bearer top-secret")]
        scope = scope_of(**{name: f"{prefix}trainspan-{TRACE}-guess"})
        assert identify(scope, ["top-secret"], KEY).parent == TRACE
        assert scope["headers"] == []


def test_a_key_that_only_looks_like_ours_is_left_alone() -> None:
    scope = scope_of(authorization="Bearer trainspan-my-own-key")
    assert identify(scope, ["trainspan-my-own-key"], KEY) == Caller(None, None, None)
    assert scope["headers"] == [(b"authorization", b"Bearer trainspan-my-own-key")]


def test_baggage_may_come_in_several_headers_and_carries_notes() -> None:
    scope = scope_of()
    identity = Identity("r1", "run", "t", 2, 5, "val")
    for value in ("x=1", identity.to_baggage("critic"), f"{keys.NO_BOUNDARY}=true,{keys.STATE_KEY}=s%201"):
        scope["headers"].append((b"baggage", value.encode()))
    caller = identify(scope, [], KEY)
    assert (caller.identity, caller.agent, caller.counter_key) == (identity, "critic", "unsigned r1/2")
    assert dict(caller.notes) == {keys.NO_BOUNDARY: "true", keys.STATE_KEY: "s 1"}


def test_the_client_is_the_user_agent_cut_to_a_line() -> None:
    assert identify(scope_of(user_agent="OpenAI/Python 2.54.0"), [], KEY).client == "OpenAI/Python 2.54.0"
    assert identify(scope_of(user_agent="x" * 5_000), [], KEY).client == "x" * 200
    assert identify(scope_of(user_agent=""), [], KEY).client is None
    assert identify(scope_of(), [], KEY).client is None


def test_without_a_rollout_calls_are_counted_by_trace() -> None:
    assert identify(scope_of(traceparent=str(TRACE)), [], KEY).counter_key == f"unsigned {TRACE.trace_id}"
    assert identify(scope_of(), [], KEY).counter_key is None


def test_who_has_no_signature_takes_no_numbers_of_who_has_one() -> None:
    identity = Identity("r1", attempt=2)
    signed, unsigned = (
        identify(scope_of(baggage=given.to_baggage()), [], KEY) for given in (identity.signed(KEY), identity)
    )
    assert (signed.counter_key, unsigned.counter_key) == ("r1/2", "unsigned r1/2")


@given(st.text(max_size=80), st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_no_request_can_break_it(path: str, traceparent: bytes, baggage: bytes, authorization: bytes) -> None:
    headers = [(b"traceparent", traceparent), (b"baggage", baggage), (b"authorization", authorization)]
    for start in ("/", "/rollout/"):
        scope = {"path": start + path, "raw_path": None, "headers": list(headers)}
        try:
            caller = identify(scope, ["key"], KEY)
        except InvalidRecordError:
            continue
        assert caller.parent is None or len(caller.parent.trace_id) == 32


def test_only_what_the_holder_of_the_key_signed_counts_as_signed() -> None:
    identity = Identity("r", "run", "task", 2, 7, "val")
    given = identity.signed(KEY)

    def is_signed(path: str = "/v1/models", **headers: str) -> bool:
        return identify(scope_of(path, **headers), [], KEY).is_signed

    assert is_signed(baggage=given.to_baggage("planner"))
    assert identify(scope_of(baggage=given.to_baggage()), [], KEY).identity == given
    assert not is_signed(baggage=identity.to_baggage())
    assert not is_signed(baggage=identity.signed(b"other" * 8).to_baggage())
    for change in (
        {"rollout_id": "s"},
        {"attempt": 3},
        {"task_id": "u"},
        {"round": None},
        {"run_id": "x"},
        {"split": "train"},
    ):
        assert not is_signed(baggage=dataclasses.replace(given, **change).to_baggage()), change
    token = f"{TRACE}.{TRACE.signature(KEY)}"
    assert is_signed(f"/rollout/{token}/v1/models")
    assert is_signed(authorization=f"Bearer trainspan-{token}-secret")
    assert not is_signed(f"/rollout/{TRACE}/v1/models")
    assert not is_signed(f"/rollout/{OTHER}.{TRACE.signature(KEY)}/v1/models")
    # A signed URL does not validate a made-up identity, nor does a trace's signature validate an identity.
    assert not is_signed(f"/rollout/{token}/v1/models", baggage=identity.to_baggage())
    forged = dataclasses.replace(identity, signature=TRACE.signature(KEY))
    assert not is_signed(f"/rollout/{token}/v1/models", baggage=forged.to_baggage())


def test_signature_and_secret_are_taken_out_of_a_url() -> None:
    token = f"{TRACE}.{TRACE.signature(KEY)}-top-secret"
    scope = scope_of(f"/rollout/{token}/v1/models")
    assert identify(scope, ["top-secret"], KEY).is_signed
    assert (scope["path"], scope["raw_path"]) == ("/v1/models", b"/v1/models")
    assert dict(scope["headers"]) == {b"authorization": b"Bearer top-secret"}


@pytest.mark.parametrize(("stated", "expected"), [(None, False), (clock_id(), True), ("another machine's", False)])
def test_a_callers_times_can_be_compared_if_it_states_the_clock_of_this_machine(
    stated: str | None, expected: bool
) -> None:
    baggage = f"{keys.CLOCK}={quote(stated)}" if stated else "a=1"
    assert identify(scope_of(baggage=baggage), [], KEY).has_our_clock is expected
