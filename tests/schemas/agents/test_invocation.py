"""Calls of users' functions: in order, in parallel, and a hanging call does not block the others."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from trainspan_schemas.agents.invocation import Invoker


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Releases hanging functions after the test."""
    event = threading.Event()
    yield event
    event.set()


def outcomes(function: Callable[..., Any], numbers: range, concurrency: int = 4, timeout_s: float = 30.0) -> list[Any]:
    """The result of each call, or its exception as text."""
    with closing(Invoker(function, "test")) as invoker:
        futures = invoker.results(((number,) for number in numbers), concurrency, timeout_s)
    return [future.result() if future.exception() is None else repr(future.exception()) for future in futures]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_results_are_in_the_order_of_the_calls_whatever_ends_first(asynchronous: bool) -> None:
    def backwards(number: int) -> int:
        time.sleep(0.02 * (8 - number))
        return number * 10

    async def backwards_too(number: int) -> int:
        await asyncio.sleep(0.02 * (8 - number))
        return number * 10

    assert outcomes(backwards_too if asynchronous else backwards, range(8), 8) == [n * 10 for n in range(8)]


def test_as_many_calls_as_wanted_are_under_way_and_no_more() -> None:
    meeting = threading.Barrier(3, timeout=10)
    lock, active, most = threading.Lock(), 0, 0

    def meet(number: int) -> int:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        meeting.wait()  # passed by three at a time only
        with lock:
            active -= 1
        return number

    assert outcomes(meet, range(9), 3) == list(range(9))
    assert most == 3
    most = 0
    meeting = threading.Barrier(1)
    assert outcomes(meet, range(3), 1) == [0, 1, 2]
    assert most == 1


def test_a_call_that_hangs_gives_its_place_to_the_next(release: threading.Event) -> None:
    def hang(number: int) -> int:
        if number == 1:
            release.wait(60)
        return number

    began = time.monotonic()
    assert outcomes(hang, range(4), 1, timeout_s=0.3) == [0, "TimeoutError('no result within 0.3 s')", 2, 3]
    assert time.monotonic() - began < 10


def test_an_asynchronous_call_that_hangs_is_cancelled_and_one_that_blocks_its_loop_blocks_no_more_than_that(
    release: threading.Event,
) -> None:
    cancelled = threading.Event()

    async def hang(number: int) -> int:
        if number == 1:
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()
        return number

    assert outcomes(hang, range(3), 1, timeout_s=0.3) == [0, "TimeoutError('no result within 0.3 s')", 2]
    assert cancelled.wait(5)

    async def block(number: int) -> int:
        return int(release.wait(60)) + number

    assert outcomes(block, range(2), 2, timeout_s=0.3) == ["TimeoutError('no result within 0.3 s')"] * 2


def test_whatever_a_function_raises_is_the_failure_of_that_call_alone() -> None:
    raised = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), ValueError("no")]
    expected = [
        "RuntimeError('it raised SystemExit(3)')",
        "RuntimeError('it raised KeyboardInterrupt()')",
        "RuntimeError('it raised CancelledError()')",
        "ValueError('no')",
        "4",
    ]

    def fail(number: int) -> str:
        if number < len(raised):
            raise raised[number]
        return str(number)

    async def fail_too(number: int) -> str:
        return fail(number)

    def fail_later(number: int) -> Any:
        return fail_too(number)

    for function in (fail, fail_too, fail_later):
        assert outcomes(function, range(5), 1) == expected


def test_a_call_that_fails_before_its_coroutine_begins_is_the_failure_of_that_call_alone() -> None:
    async def wants_two(number: int, other: int) -> int:
        return number + other

    assert all(
        "missing 1 required positional argument: 'other'" in failure for failure in outcomes(wants_two, range(3), 1)
    )


def test_what_an_asynchronous_call_opened_can_be_used_by_the_next() -> None:
    lock: asyncio.Lock | None = None

    async def share(number: int) -> int:
        nonlocal lock
        lock = lock or asyncio.Lock()
        async with lock:  # raises RuntimeError in another loop if another call waits for it
            await asyncio.sleep(0.01)
        return number

    assert outcomes(share, range(6), 3) == list(range(6))
