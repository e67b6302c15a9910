"""Calls a user's function without hanging if it hangs: synchronous ones in threads, asynchronous ones in a loop.

A call that takes too long is abandoned: a thread cannot be stopped, but a daemon thread does not keep the process alive.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any

__all__ = ["Invoker"]

_Job = tuple["Future[Any]", tuple[Any, ...]]


class Invoker:
    """Starts calls of one function.

    Calls of an asynchronous function share one event loop in a separate thread: a call can use what an earlier one opened,
    and a function that blocks its loop blocks nothing else.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """`name` is the name of the threads."""
        self._function = function
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = self._idle = 0

    def start(self, *arguments: Any) -> "Future[Any]":
        """The future of the call; what it raises is always an Exception. Canceling it cancels an asynchronous call."""
        if inspect.iscoroutinefunction(self._function):
            # Called in the loop: if the call itself raises, say for a missing argument, only that call fails.
            return asyncio.run_coroutine_threadsafe(_ended(self._function, arguments), self._running_loop())
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a call in a thread cannot be canceled
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:  # no threads yet, or all are busy or hang
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
            self._jobs.put((future, arguments))
        return future

    def results(self, calls: Iterable[tuple[Any, ...]], concurrency: int, timeout_s: float) -> "list[Future[Any]]":
        """Runs `calls` (tuples of arguments), at most `concurrency` at a time; results are in their order.

        A call that has run for `timeout_s` gets a TimeoutError, and the next one starts.
        """
        ended: dict[int, Future[Any]] = {}
        under_way: dict[Future[Any], tuple[int, float]] = {}

        def take_ended() -> None:
            first_s = min(deadline_s for _, deadline_s in under_way.values())
            wait(under_way, max(0.0, first_s - time.monotonic()), FIRST_COMPLETED)
            for future, (number, deadline_s) in list(under_way.items()):
                if not future.done() and time.monotonic() < deadline_s:
                    continue
                del under_way[future]
                ended[number] = future if future.done() else _given_up(future, timeout_s)

        for number, arguments in enumerate(calls):
            while len(under_way) >= concurrency:
                take_ended()
            under_way[self.start(*arguments)] = number, time.monotonic() + timeout_s
        while under_way:
            take_ended()
        return [ended[number] for number in range(len(ended))]

    def close(self) -> None:
        """Cancels unfinished asynchronous calls; threads end after their current call."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, arguments = job
            value: Any = None
            failure: Exception | None = None
            try:
                value = self._function(*arguments)
                if inspect.isawaitable(value):
                    value = asyncio.run_coroutine_threadsafe(_ended(_given, (value,)), self._running_loop()).result()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                failure = error
            except BaseException as error:  # noqa: BLE001
                failure = _as_exception(error)
            with self._lock:  # before the caller that waits for the result starts the next call
                self._idle += 1
            if failure is None:
                future.set_result(value)
            else:
                future.set_exception(failure)
            del job, future, arguments, value, failure  # frees them while it waits

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name=f"{self._name}-loop", daemon=True).start()
            return self._loop


def _given_up(future: "Future[Any]", timeout_s: float) -> "Future[Any]":
    future.cancel()
    late: Future[Any] = Future()
    late.set_exception(TimeoutError(f"no result within {timeout_s:g} s"))
    return late


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left))
    finally:
        loop.close()


def _given(awaitable: Awaitable[Any]) -> Awaitable[Any]:
    return awaitable


async def _ended(function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
    """Returns the call's result. Raises nothing that would end the loop or look like a canceled caller."""
    try:
        return await function(*arguments)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _as_exception(error) from None
    except (SystemExit, KeyboardInterrupt) as error:
        raise _as_exception(error) from None


def _as_exception(error: BaseException) -> RuntimeError:
    return RuntimeError(f"it raised {error!r}")
