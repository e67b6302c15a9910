"""Blocks of generators: a generator has no context of its own, so what it enters stays current in the code around it.

Each test asks "whose call is this?" where a program would call the policy: with the headers that its request would have.
"""

import asyncio
import contextvars
import functools
import gc
import importlib
import logging
import threading
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from itertools import zip_longest
from typing import Any, cast

import pytest
from opentelemetry import trace

import trainspan
from tests.exporters.rollout.conftest import UNASKED_URL
from trainspan import _guard
from trainspan._calls.policy_request import prepare
from trainspan._rollout.last_call import came_back, last_call
from trainspan._rollout.scope import Scope, current_scope
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import parse_baggage

greenlet: Any = importlib.import_module("greenlet")  # without types

pytestmark = pytest.mark.usefixtures("fresh")


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def ask() -> str | None:
    """Returns the task of the rollout that a call here belongs to."""
    headers: dict[str, str] = {}
    assert prepare("POST", f"{UNASKED_URL}/chat/completions", headers) is not None
    members = parse_baggage(headers["baggage"])
    assert (keys.ROLLOUT_ID in members) != (keys.NO_BOUNDARY in members)
    return members.get(keys.TASK_ID)


def solve(task: str, calls: list[str | None], steps: int = 3) -> Iterator[int]:
    with trainspan.rollout(task_id=task):
        for step in range(steps):
            calls.append(ask())
            yield step
            calls.append(ask())


async def solve_async(task: str, calls: list[str | None], steps: int = 3) -> AsyncIterator[int]:
    async with trainspan.rollout(task_id=task):
        for step in range(steps):
            calls.append(ask())
            await asyncio.sleep(0)
            yield step
            calls.append(ask())


@asynchronous
async def test_asynchronous_generators_left_by_break_are_rollouts_of_their_own() -> None:
    calls: list[str | None] = []
    between: list[str | None] = []
    for number in range(3):
        async for _ in solve_async(f"task-{number}", calls):
            between.append(ask())
            break
    for _ in range(5):
        await asyncio.sleep(0)  # asyncio closes them in tasks of its own
    assert calls == ["task-0", "task-1", "task-2"]
    assert between == [None] * 3
    with trainspan.rollout(task_id="after"):
        assert ask() == "after"
    assert ask() is None


def test_a_generator_that_is_left_is_ok_and_one_that_is_cancelled_at_work_is_not() -> None:
    statuses: list[str] = []

    async def agent(future: "asyncio.Future[None] | None") -> AsyncIterator[int]:
        block = trainspan.rollout()
        try:
            with block:
                yield 0
                assert future is not None
                await future
        finally:
            assert block._scope is not None
            statuses.append(str(block._scope.status))

    scopes: list[Scope | None] = []

    @trainspan.rollout()
    async def decorated() -> AsyncIterator[int]:
        scopes.append(current_scope())
        yield 0

    async def leave() -> None:
        async for _ in agent(None):
            break  # the loop ends before it is closed

    async def leave_decorated() -> None:
        async for _ in decorated():
            break

    async def cancel() -> None:
        future = asyncio.get_running_loop().create_future()
        steps = agent(future)
        await anext(steps)
        task = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(leave())
    asyncio.run(leave_decorated())
    asyncio.run(cancel())
    assert statuses == ["ok", "cancelled"]
    assert [scope and scope.status for scope in scopes] == ["ok"]


def test_generators_advanced_in_turn_keep_their_blocks() -> None:
    first: list[str | None] = []
    second: list[str | None] = []
    with trainspan.rollout(task_id="around"):
        pass
    for _ in zip(solve("a", first), solve("b", second), strict=True):
        with trainspan.rollout(task_id="between"):
            assert ask() == "between"
    assert set(first) == {"a"}
    assert set(second) == {"b"}
    assert (len(first), len(second)) == (6, 6)
    assert ask() is None


@asynchronous
async def test_asynchronous_generators_advanced_in_turn_keep_their_blocks() -> None:
    first: list[str | None] = []
    second: list[str | None] = []
    one, two = solve_async("a", first), solve_async("b", second)
    for _ in range(3):
        await anext(one)
        await anext(two)
    await asyncio.gather(one.aclose(), two.aclose())  # type: ignore[attr-defined]
    assert (set(first), set(second)) == ({"a"}, {"b"})
    assert ask() is None


@asynchronous
async def test_after_another_task_closed_a_generator_nothing_joins_its_rollout() -> None:
    calls: list[str | None] = []
    left = solve_async("left", calls)
    await anext(left)
    await asyncio.create_task(left.aclose())  # type: ignore[attr-defined]
    assert ask() is None
    assert await asyncio.create_task(async_ask()) is None
    with trainspan.rollout(task_id="after") as block:
        assert ask() == "after"
        assert trace.get_current_span().get_span_context().trace_id == int(block.traceparent[3:35], 16)


async def async_ask() -> str | None:
    return ask()


@asynchronous
async def test_an_asynchronous_block_closed_by_another_task_is_over_where_it_was_entered() -> None:
    block = trainspan.rollout(task_id="handed")
    await block.__aenter__()
    assert ask() == "handed"
    await asyncio.create_task(block.__aexit__(None, None, None))
    assert ask() is None
    assert await asyncio.create_task(async_ask()) is None
    assert await asyncio.to_thread(ask) is None
    with trainspan.rollout(task_id="after"):
        assert ask() == "after"


@asynchronous
async def test_what_a_generator_starts_belongs_to_its_block_and_what_its_consumer_starts_does_not() -> None:
    inside: list[str | None] = []
    later: list[asyncio.Task[None]] = []

    async def delayed(calls: list[str | None]) -> None:
        await asyncio.sleep(0.02)
        calls.append(ask())

    async def agent() -> AsyncIterator[int]:
        async with trainspan.rollout(task_id="agent"):
            for step in range(3):
                later.append(asyncio.create_task(delayed(inside)))
                inside.extend(await asyncio.gather(async_ask(), asyncio.to_thread(ask)))
                inside.append(await asyncio.create_task(async_ask(), context=contextvars.copy_context()))
                yield step

    outside: list[str | None] = []
    async for _ in agent():
        later.append(asyncio.create_task(delayed(outside)))
        outside.append(await asyncio.create_task(async_ask(), context=contextvars.copy_context()))
        outside.extend(await asyncio.gather(async_ask(), asyncio.to_thread(ask)))
    await asyncio.gather(*later)
    assert inside == ["agent"] * 12
    assert outside == [None] * 12


def test_a_consumer_without_a_loop_runs_its_own_loops_and_threads_outside_the_block() -> None:
    calls: list[str | None] = []
    between: list[str | None] = []
    for _ in solve("task", calls):
        between.append(asyncio.run(async_ask()))
        thread = threading.Thread(target=lambda: between.append(ask()))
        thread.start()
        thread.join()
    assert (set(calls), set(between)) == ({"task"}, {None})


@asynchronous
async def test_a_generator_whose_steps_are_tasks_or_threads_of_their_own_keeps_its_block() -> None:
    calls: list[str | None] = []

    async def threaded() -> AsyncIterator[int]:
        async with trainspan.rollout(task_id="stream"):
            for step in range(3):
                calls.append(await asyncio.to_thread(ask))
                calls.extend(await asyncio.gather(async_ask(), async_ask()))
                yield step

    steps = threaded()
    for _ in range(3):
        await asyncio.create_task(anext(steps))  # type: ignore[arg-type]  # as asyncio.wait_for does up to Python 3.11
    await steps.aclose()  # type: ignore[attr-defined]
    assert calls == ["stream"] * 9

    from starlette.concurrency import iterate_in_threadpool

    synchronous: list[str | None] = []
    async for _ in iterate_in_threadpool(solve("pool", synchronous)):
        assert ask() is None
    assert synchronous == ["pool"] * 6


@asynchronous
async def test_callbacks_that_a_consumer_leaves_to_the_loop_are_outside_of_the_waiting_block() -> None:
    """asyncio copies the context for them without asking OpenTelemetry, while the generator's is still attached."""
    loop = asyncio.get_running_loop()
    calls: list[tuple[str, str | None]] = []
    started: list[asyncio.Task[None]] = []

    def note(name: str) -> None:
        calls.append((name, ask()))

    def start_task() -> None:
        async def run() -> None:
            note("task")

        started.append(loop.create_task(run()))

    def schedule() -> None:
        loop.call_soon(note, "soon")
        loop.call_later(0.001, start_task)
        future = loop.create_future()
        future.add_done_callback(lambda _: note("done"))
        future.set_result(None)

    async def agent() -> AsyncGenerator[int]:
        with trainspan.rollout(task_id="agent"):
            yield 0
            schedule()
            await asyncio.sleep(0.05)
            yield 1

    steps = agent()
    await anext(steps)
    schedule()
    await asyncio.sleep(0.05)
    assert calls == [("soon", None), ("done", None), ("task", None)]
    await anext(steps)
    assert calls[3:] == [("soon", "agent"), ("done", "agent"), ("task", "agent")]
    await steps.aclose()


@asynchronous
async def test_a_greenlet_that_a_generator_waits_for_is_in_its_block() -> None:
    """As in SQLAlchemy's asynchronous sessions: the greenlet has a stack of its own, in the generator's context."""

    def spawned(function: Callable[[], str | None]) -> str | None:
        current = greenlet.getcurrent()
        other = greenlet.greenlet(function, current)
        other.gr_context = current.gr_context
        return cast("str | None", other.switch())

    async def agent() -> AsyncIterator[str | None]:
        with trainspan.rollout(task_id="agent"):
            yield spawned(ask)
            await asyncio.sleep(0)
            yield spawned(lambda: spawned(ask))

    assert [(inside, spawned(ask)) async for inside in agent()] == [("agent", None)] * 2


def test_generators_advanced_in_turn_have_each_their_own_last_call() -> None:
    """Both join one rollout, so that a reward of="call" would otherwise go to the other one's call."""
    calls: list[tuple[str | None, str]] = []

    def agent(names: str) -> Iterator[str]:
        with trainspan.rollout():
            for name in names:
                scope = current_scope()
                assert scope is not None
                came_back(scope.beginning, name * 16)
                yield name
                calls.append((last_call(scope.beginning), name * 16))

    with trainspan.rollout(task_id="outer"):
        scope = current_scope()
        assert scope is not None
        last = [last_call(scope.beginning) for _ in zip_longest(agent("ab"), agent("cde"))]
    assert calls == [(name, name) for _, name in calls]
    assert sorted(name[0] for _, name in calls) == list("abcde")
    assert [name and name[0] for name in last] == ["c", "d", "e"]


def test_coroutines_that_a_program_advances_itself_keep_their_blocks() -> None:
    """A scheduler of its own, without asyncio's tasks, as simulations have them."""

    @types.coroutine
    def pause() -> Iterator[None]:
        yield

    calls: list[tuple[str, str | None]] = []

    async def agent(task: str) -> None:
        async def step() -> None:
            calls.append((task, ask()))
            await pause()

        with trainspan.rollout(task_id=task):
            await step()
            await step()

    def advance_all() -> list[str | None]:
        between, running = [], [agent("a"), agent("b")]
        while running:
            for coroutine in list(running):
                try:
                    coroutine.send(None)
                except StopIteration:
                    running.remove(coroutine)
                between.append(ask())
        return between

    async def within_a_task() -> list[str | None]:
        return advance_all()

    assert advance_all() == asyncio.run(within_a_task()) == [None] * 6
    assert calls == [("a", "a"), ("b", "b")] * 4


def test_generators_kept_in_variables_can_be_resumed_within_other_blocks() -> None:
    kept_calls: list[str | None] = []
    kept = solve("kept", kept_calls)
    next(kept)
    with trainspan.rollout(task_id="other"):
        assert ask() == "other"
        next(kept)
        assert ask() == "other"
        kept.close()  # type: ignore[attr-defined]
        assert ask() == "other"
    assert kept_calls == ["kept"] * 3
    assert ask() is None


def test_a_dropped_generator_ends_its_block_wherever_it_is_collected() -> None:
    calls: list[str | None] = []
    kept: Iterator[int] | None = solve("kept", calls)
    assert kept is not None
    next(kept)
    with trainspan.rollout(task_id="other"):
        kept = None
        gc.collect()
        assert ask() == "other"
    assert ask() is None


def test_spans_stay_in_the_trace_of_the_code_that_starts_them() -> None:
    traces: list[int] = []

    def agent() -> Iterator[str]:
        with trainspan.rollout() as block:
            for _ in range(2):
                traces.append(trace.get_current_span().get_span_context().trace_id)
                yield block.traceparent[3:35]

    mine = trace.NonRecordingSpan(trace.SpanContext(7, 7, False))
    with trace.use_span(mine):
        for of_block in agent():
            assert trace.get_current_span() is mine
            assert traces[-1] == int(of_block, 16)
        assert trace.get_current_span() is mine


def test_a_consumers_span_that_began_while_the_generator_waited_is_current_after_it_ends() -> None:
    calls: list[str | None] = []
    steps = solve("task", calls, steps=1)
    next(steps)
    mine = trace.NonRecordingSpan(trace.SpanContext(7, 7, False))
    with trace.use_span(mine):
        assert next(steps, None) is None
        assert trace.get_current_span() is mine
    assert ask() is None
    assert calls == ["task"] * 2


def test_an_inner_block_of_a_generator_joins_and_is_over_with_the_outer_one(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str | None] = []
    kept = solve("joins", calls)
    with trainspan.rollout(task_id="outer"):
        next(kept)
        assert ask() == "outer"
    with trainspan.rollout(task_id="later"), caplog.at_level(logging.WARNING, "trainspan"):
        next(kept)
        assert ask() == "later"
    assert calls == ["outer", None, None]
    assert _guard.faults["joined_block_outlived"] == 2
    assert "event=joined_block_outlived" in caplog.text
