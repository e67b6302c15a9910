"""Blocks that a context manager, a fixture, a decorated generator or a hook holds open for the code in it."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pluggy
import pytest
from opentelemetry import context

import trainspan
from tests.exporters.rollout.test_suspended_blocks import ask, async_ask, asynchronous
from trainspan import _guard

pytestmark = pytest.mark.usefixtures("fresh")


@contextlib.contextmanager
def episode(task: str) -> Iterator[trainspan.Rollout]:
    with trainspan.rollout(task_id=task) as block:
        yield block


@contextlib.asynccontextmanager
async def episode_async(task: str) -> AsyncIterator[trainspan.Rollout]:
    async with trainspan.rollout(task_id=task) as block:
        yield block


@asynchronous
async def test_a_generator_that_is_a_context_manager_holds_its_body() -> None:
    with episode("body"):
        assert ask() == "body"
        assert await asyncio.create_task(async_ask()) == "body"
    assert ask() is None
    with contextlib.ExitStack() as stack:
        stack.enter_context(episode("stack"))
        assert ask() == "stack"
    async with contextlib.AsyncExitStack() as asynchronous:
        await asynchronous.enter_async_context(episode_async("async"))
        assert ask() == "async"
    assert ask() is None


def test_an_exit_stack_or_a_manager_within_a_generator_belongs_to_it() -> None:
    def agent(task: str, enter: Callable[[contextlib.ExitStack], object]) -> Iterator[str | None]:
        with contextlib.ExitStack() as stack:
            enter(stack)
            for _ in range(2):
                yield ask()

    def of_a_block(stack: contextlib.ExitStack) -> None:
        stack.enter_context(trainspan.rollout(task_id="one"))

    one = agent("one", of_a_block)
    two = agent("two", lambda stack: stack.enter_context(episode("two")))
    assert [*zip(one, two, strict=True)] == [("one", "two")] * 2
    assert ask() is None


def test_a_block_entered_by_a_generator_for_its_caller_goes_on_after_the_generator() -> None:
    def begin(stack: contextlib.ExitStack) -> Iterator[str | None]:
        stack.enter_context(trainspan.rollout(task_id="lasting"))
        yield ask()

    with contextlib.ExitStack() as stack:
        assert [*begin(stack)] == ["lasting"]
        assert ask() == "lasting"
    assert ask() is None


class _Hooks:
    @pluggy.HookspecMarker("agents")
    def solve(self) -> list[str | None]:  # type: ignore[empty-body]
        """Called with rollouts around it."""


class _Agent:
    @pluggy.HookimplMarker("agents")
    def solve(self) -> str | None:
        return ask()


class _Wrapper:
    @pluggy.HookimplMarker("agents")(wrapper=True)
    def solve(self) -> Iterator[None]:
        with trainspan.rollout(task_id="wrapper"):
            return (yield)


class _OldWrapper:
    @pluggy.HookimplMarker("agents")(hookwrapper=True)
    def solve(self) -> Iterator[None]:
        with trainspan.rollout(task_id="old"):
            yield


@pytest.mark.parametrize(("wrapper", "task"), [(_Wrapper, "wrapper"), (_OldWrapper, "old")])
def test_a_hook_wrapper_of_pluggy_holds_what_it_wraps(wrapper: type, task: str) -> None:
    manager = pluggy.PluginManager("agents")
    manager.add_hookspecs(_Hooks)
    manager.register(_Agent())
    manager.register(wrapper())
    assert manager.hook.solve() == [task]
    assert ask() is None


@pytest.fixture
def hosted(fresh: None) -> Iterator[trainspan.Rollout]:
    with trainspan.rollout(task_id="fixture") as block:
        yield block


@pytest.mark.usefixtures("hosted")
def test_a_fixture_that_yields_holds_its_test() -> None:
    assert ask() == "fixture"


@asynchronous
async def test_a_decorated_generator_is_one_rollout_from_its_first_step_to_its_last() -> None:
    @trainspan.rollout(task_id="steps")
    def steps() -> Iterator[str | None]:
        received = yield ask()
        assert received == "sent"
        yield ask()

    started = steps()
    assert (next(started), ask()) == ("steps", None)
    assert (started.send("sent"), next(started, "end"), ask()) == ("steps", "end", None)  # type: ignore[attr-defined]

    closed: list[str | None] = []

    @trainspan.rollout(task_id="async")
    async def steps_async() -> AsyncIterator[str | None]:
        try:
            received = yield ask()
            assert received == "sent"
            yield ask()
        finally:
            closed.append(ask())

    started_async = steps_async()
    assert (await anext(started_async), ask()) == ("async", None)
    assert (await started_async.asend("sent"), ask()) == ("async", None)  # type: ignore[attr-defined]
    await started_async.aclose()  # type: ignore[attr-defined]
    assert (closed, ask()) == (["async"], None)


@asynchronous
async def test_what_is_thrown_into_a_decorated_asynchronous_generator_arrives_in_it() -> None:
    @trainspan.rollout(task_id="thrown")
    async def steps() -> AsyncGenerator[str, str]:
        for step in range(2):
            try:
                yield f"{step} {ask()}"
            except ValueError as error:
                received = yield f"{step} {error} {ask()}"
                assert received == "sent"

    started = steps()
    assert await anext(started) == "0 thrown"
    assert await started.athrow(ValueError("a")) == "0 a thrown"
    assert await started.asend("sent") == "1 thrown"
    with pytest.raises(KeyError, match="b"):
        await started.athrow(KeyError("b"))
    with pytest.raises(StopAsyncIteration):
        await anext(started)
    assert ask() is None


def test_a_reward_between_the_steps_is_refused_by_name_unless_a_block_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def agent() -> Iterator[trainspan.Rollout]:
        with trainspan.rollout() as block:
            yield block
            trainspan.reward(0.5)

    with caplog.at_level(logging.WARNING, "trainspan"):
        for block in agent():
            trainspan.reward(7.0)
            block.reward(1.0)
    assert block._scope is not None
    assert block._scope.rewards == [1.0, 0.5]
    assert _guard.faults["reward_between_steps"] == 1
    assert caplog.text.count("event=reward_between_steps") == 1


@asynchronous
async def test_an_ended_block_is_joined_by_no_block_of_its_tasks() -> None:
    ended = asyncio.Event()

    async def background() -> tuple[str | None, str | None]:
        await ended.wait()
        with trainspan.rollout(task_id="own"):
            own = ask()
        return own, ask()

    async with trainspan.rollout(task_id="over"):
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
    ended.set()
    assert await task == ("own", "over"), "its calls are still work that the block began"


@asynchronous
async def test_a_block_holds_its_tasks_threads_and_gathered_calls() -> None:
    async with trainspan.rollout(task_id="held"):
        assert list(await asyncio.gather(async_ask(), asyncio.to_thread(ask))) == ["held"] * 2
        with trainspan.rollout(task_id="inner"):
            assert ask() == "held"
        carried = context.get_current()

    def in_context() -> str | None:
        token = context.attach(carried)
        try:
            return ask()
        finally:
            context.detach(token)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_context).result() == "held"
        assert pool.submit(functools.partial(ask)).result() is None
