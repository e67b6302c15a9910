"""Who may register what for whom, on a real policy server."""

import dataclasses
import json
import time
from typing import Any

import pytest

from tests.serving.forcing.branches import Rollout, calls_of, prefix_of
from tests.serving.support.servers import Stack
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity
from trainspan_schemas.telemetry.prefix import PREFIX_PATH, ForcedCall, signed_request
from trainspan_schemas.telemetry.tokens import encode_ids

pytestmark = pytest.mark.usefixtures("base_policy")

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "7*5", "max_tokens": 8}


@pytest.fixture
def calls(stack: Stack) -> list[ForcedCall]:
    original = Rollout(stack)
    original.ask(PATH, BODY)
    return calls_of(original.spans(1))


@pytest.fixture
def branch(stack: Stack) -> Rollout:
    return Rollout(stack)


def test_only_the_runner_registers_and_ends_branches(branch: Rollout, calls: list[ForcedCall]) -> None:
    body = prefix_of(branch, calls, 1).to_json()
    good = signed_request(branch.key, PREFIX_PATH, body)
    other_date = {**good, "x-trainspan-issued": f"{time.time() + 60:.0f}"}
    other_key = signed_request(b"0" * 64, PREFIX_PATH, body)
    own = {"x-trainspan-signature": str(branch.identity.signature)}  # all that an agent has
    for headers in ({}, own, {**good, **own}, other_date, other_key, {**good, "x-trainspan-issued": "now"}):
        status, text, _ = branch.send(PREFIX_PATH, body, headers)
        assert (status, json.loads(text)["reason"]) == (401, "refused")
    changed = body.replace(b'"attempt": 0', b'"attempt": 1')
    assert branch.send(PREFIX_PATH, changed, good)[0] == 401
    assert branch.send(f"{PREFIX_PATH}/end", body, good)[0] == 401
    assert branch.send(PREFIX_PATH, body, good)[0] == 200
    branch.end()


def test_a_prefix_is_registered_once_and_forgotten_at_the_end(branch: Rollout, calls: list[ForcedCall]) -> None:
    prefix = prefix_of(branch, calls, 1)
    registered = branch.stack.server.policy()["branches"]
    branch.register(prefix)
    branch.register(prefix)  # the answer to the first request may have been lost
    assert branch.stack.server.policy()["branches"] == registered + 1
    status, answer = branch.request(PREFIX_PATH, dataclasses.replace(prefix, later=("0" * 32,)).to_json())
    assert (status, answer["error"]) == (
        409,
        f"attempt 0 of rollout '{branch.identity.rollout_id}' has a prefix already",
    )
    assert branch.end() == {"forced": 0, "missing": 1, "sampled": 0, "diverged": None}
    body = json.dumps({"rollout": branch.identity.rollout_id, "attempt": 0}).encode()
    assert branch.request(f"{PREFIX_PATH}/end", body)[0] == 404
    assert branch.stack.server.policy()["branches"] == registered


def test_what_does_not_fit_the_model_or_the_format_is_refused(branch: Rollout, calls: list[ForcedCall]) -> None:
    prefix, call = prefix_of(branch, calls, 1), calls[0]
    choice = call.choices[0]
    for ids in ([2**31 - 1], [-1]):
        bad = dataclasses.replace(choice, ids=encode_ids(ids), logprobs=choice.logprobs[:4])
        wrong = dataclasses.replace(prefix, calls=(dataclasses.replace(call, choices=(bad,)),))
        status, answer = branch.request(PREFIX_PATH, wrong.to_json())
        assert (status, answer["error"].partition(" of ")[0]) == (
            400,
            f"call 0: token {ids[0]} is not in the vocabulary",
        )
    endless = dataclasses.replace(prefix, lives_s=1e9)
    assert branch.request(PREFIX_PATH, endless.to_json())[0] == 400
    record = json.loads(prefix.to_json())
    for broken in (
        b"{",
        b"[]",
        json.dumps({**record, "calls": [], "later": []}).encode(),
        json.dumps({**record, "lives_s": "x"}).encode(),
        json.dumps({**record, "calls": [{**record["calls"][0], "prompt": "AAA="}]}).encode(),
        json.dumps({**record, "calls": [{**record["calls"][0], "choices": [["AAAAAA==", "", "stop"]]}]}).encode(),
        json.dumps(
            {**record, "calls": [{**record["calls"][0], "choices": [["AAAAAA==", "AAAAAA==", "abort"]]}]}
        ).encode(),
        b"[" * 100_000,
    ):
        status, answer = branch.request(PREFIX_PATH, broken)
        assert (status, answer["error"][:12]) == (400, "not a prefix")


def test_another_rollout_is_not_answered_with_the_stored_calls(branch: Rollout, calls: list[ForcedCall]) -> None:
    """Nor is one that names the branch without the runner's signature, or is in its trace under its own name."""
    branch.register(prefix_of(branch, calls, 1))
    other = Rollout(branch.stack)
    forged = Identity(branch.identity.rollout_id, "run", "task", 0, 1, signature=other.identity.signature)
    trace = {"traceparent": str(branch.parent)}
    for headers in (
        {"baggage": forged.to_baggage()},
        {"baggage": other.identity.to_baggage(), **trace},
        trace,
        {"traceparent": str(branch.parent), "Authorization": f"Bearer trainspan-{branch.parent}"},
    ):
        assert other.ask(PATH, BODY, headers)[0] == 200
    assert branch.end() == {"forced": 0, "missing": 1, "sampled": 0, "diverged": None}
    spans = branch.stack.sink.wait(
        3, lambda span: span.trace_id == branch.parent.trace_id or span.attributes.get(keys.ROLLOUT_ID) is not None
    )
    assert not any(keys.CALL_FORCED in span.attributes for span in spans if span.trace_id == branch.parent.trace_id)


def test_a_prefix_expires(branch: Rollout, calls: list[ForcedCall]) -> None:
    branch.register(prefix_of(branch, calls, 1, lives_s=0.2))
    time.sleep(0.3)
    assert branch.ask(PATH, BODY)[0] == 200
    body = json.dumps({"rollout": branch.identity.rollout_id, "attempt": 0}).encode()
    assert branch.request(f"{PREFIX_PATH}/end", body)[0] == 404
    (span,) = branch.spans(1)
    assert keys.CALL_FORCED not in span.attributes
