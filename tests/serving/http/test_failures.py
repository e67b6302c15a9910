"""The server's count of its own failures, which the runner asks for."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.failures import RequestFailures, attempt_key, failures_path, keys_of_path
from trainspan_schemas.telemetry.identity import TraceParent
from trainspan_serving.capture.caller import Caller
from trainspan_serving.http import failures
from trainspan_serving.http.failures import FailureLog


def _caller(number: int) -> Caller:
    return Caller(TraceParent(f"{number:032x}", f"{number:016x}"), None, None, is_signed=True)


def test_refused_requests_of_signed_callers_are_counted_and_500_only_if_an_engine_was_at_work() -> None:
    now_s = [5.0]
    log = FailureLog(lambda: now_s[0])
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer(caller: Caller, *statuses: int, is_at_work: bool = False) -> None:
        for status in statuses:
            watched = log.watched(caller, send, lambda: is_at_work)
            await watched({"type": "http.response.start", "status": status})
            await watched({"type": "http.response.body", "body": b""})

    asyncio.run(answer(_caller(1), 200, 400, 401, 404, 422, 429, 500, 503))
    asyncio.run(answer(_caller(2), 200, 400, 500, is_at_work=True))
    asyncio.run(answer(replace(_caller(3), is_signed=False), 503))
    asyncio.run(answer(replace(_caller(4), parent=None), 503))
    now_s[0] = 7.5
    assert [log.of([f"{number:032x}"]).failures for number in (1, 2, 3)] == [2, 1, 0]
    assert log.of([f"{number:032x}" for number in (1, 2)]).failures == 3
    assert log.up_s == 2.5
    assert len(sent) == 2 * 13


def test_the_last_refusal_of_a_signed_caller_is_noted_and_prompts_that_are_too_long_are_counted() -> None:
    log = FailureLog()
    long = "This model's maximum context length is 24 tokens. However, your prompt contains at least 25"
    answers = [
        (400, {"error": {"message": long, "type": "BadRequestError"}}),
        (400, {"type": "error", "error": {"message": "no\n tool"}}),
        (200, {"error": "fine"}),
    ]

    async def send(message: Any) -> None:
        pass

    async def answer(caller: Caller, status: int, *parts: bytes) -> None:
        watched = log.watched(caller, send)
        await watched({"type": "http.response.start", "status": status})
        for number, part in enumerate(parts, 1):
            await watched({"type": "http.response.body", "body": part, "more_body": number < len(parts)})

    for status, body in answers:
        data = json.dumps(body).encode()
        asyncio.run(answer(_caller(1), status, data[:9], data[9:]))
        asyncio.run(answer(replace(_caller(3), is_signed=False), status, data))
    asyncio.run(answer(_caller(2), 422, b"diverged"))
    found = [log.of([f"{number:032x}"]) for number in (1, 2, 3)]
    assert [(each.overflows, each.reason) for each in found] == [(1, "no tool"), (0, "diverged"), (0, None)]


def test_attempts_that_failed_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_ATTEMPTS", 2)
    log = FailureLog()
    for number in (1, 2, 1, 3):
        log.add(_caller(number))
    assert [log.of([f"{number:032x}"]).failures for number in (1, 2, 3)] == [2, 0, 1]


@pytest.mark.parametrize(
    "body",
    [
        *(b"{}", b"[]", b"[" * 5000, b"\xff"),
        *(
            json.dumps({**RequestFailures(1, 1.0).to_record(), name: value}).encode()
            for name, value in (
                ("failures", -1),
                ("up_s", float("nan")),
                ("calls", -1),
                ("unsigned", None),
                ("refusal", 3),
            )
        ),
    ],
)
def test_what_is_no_count_of_failures_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRecordError, match="not the failures of a server"):
        RequestFailures.from_json(body)


def test_a_path_names_the_keys_of_an_attempt_whatever_is_in_its_ids() -> None:
    own = attempt_key("a/b,c %2C\u00e9", 3)
    assert keys_of_path(failures_path("0" * 32, own).encode()) == ["0" * 32, own]
    assert attempt_key("a", 1) == "a/1"
