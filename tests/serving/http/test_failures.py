"""The server's count of its own failures, which the runner asks for."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.failures import RequestFailures
from trainspan_schemas.telemetry.identity import TraceParent
from trainspan_serving.capture.caller import Caller
from trainspan_serving.http import failures
from trainspan_serving.http.failures import FailureLog


def _caller(number: int) -> Caller:
    return Caller(TraceParent(f"{number:032x}", f"{number:016x}"), None, None, is_signed=True)


def test_failed_requests_of_signed_callers_are_counted_by_trace() -> None:
    now_s = [5.0]
    log = FailureLog(lambda: now_s[0])
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer(caller: Caller, *statuses: int) -> None:
        for status in statuses:
            watched = log.watched(caller, send)
            await watched({"type": "http.response.start", "status": status})
            await watched({"type": "http.response.body", "body": b""})

    asyncio.run(answer(_caller(1), 200, 400, 401, 404, 422, 429, 500, 503))
    asyncio.run(answer(_caller(2), 200, 400))
    asyncio.run(answer(replace(_caller(3), is_signed=False), 500))
    asyncio.run(answer(replace(_caller(4), parent=None), 500))
    now_s[0] = 7.5
    assert [log.of(f"{number:032x}") for number in (1, 2, 3)] == [
        RequestFailures(3, 2.5),
        RequestFailures(0, 2.5),
        RequestFailures(0, 2.5),
    ]
    assert len(sent) == 2 * 12


def test_traces_that_failed_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_TRACES", 2)
    log = FailureLog()
    for number in (1, 2, 1, 3):
        log.add(_caller(number))
    assert [log.of(f"{number:032x}").failures for number in (1, 2, 3)] == [2, 0, 1]


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"[" * 5000, b'{"failures": -1, "up_s": 1}', b'{"failures": 1, "up_s": NaN}', b"\xff"]
)
def test_what_is_no_count_of_failures_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRecordError, match="not the failures of a server"):
        RequestFailures.from_json(body)
