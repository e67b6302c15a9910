"""Runs a function on the tasks of a runner: `python -m trainspan._worker --fd N module:function`.

Asynchronous functions share one event loop; synchronous ones get one thread per job. Every job runs in its own context,
below the runner's rollout span, in a span with this process's counts. Protocol: `trainspan_schemas.agents.worker`.
"""

import argparse
import asyncio
import contextlib
import contextvars
import dataclasses
import inspect
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode

from trainspan._guard import guarded, logger, shown
from trainspan._rollout.scope import Scope, remote_span
from trainspan._rollout_block import record_error, start_span
from trainspan_schemas.agents.functions import load_function
from trainspan_schemas.agents.worker import (
    MAX_LINE_BYTES,
    MAX_OUTCOME_BYTES,
    Cancel,
    FunctionJob,
    JobOutcome,
    Ready,
    TargetRefusal,
    decode,
    encode,
    identity_of,
)
from trainspan_schemas.errors import InvalidRecordError, ProcessError, UsageError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import TraceParent
from trainspan_schemas.telemetry.utf8 import escaped, well_formed

__all__ = ["main"]

SPAN_NAME: Final = "trainspan.agent"
MAX_VALUE_CHARS: Final = 1024 * 1024


def main() -> None:
    """Entry point; ends when the runner closes its side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("target")
    arguments = parser.parse_args()
    channel = socket.socket(fileno=arguments.fd)
    channel.set_inheritable(False)
    try:
        function = load_function(arguments.target)
    except UsageError as error:
        channel.sendall(encode(TargetRefusal(str(error), usage=True)))
    except ProcessError as error:
        logger.debug("event=import_failed target=%s", arguments.target, exc_info=True)
        channel.sendall(encode(TargetRefusal(str(error), usage=False)))
    else:
        asyncio.run(_Worker(function).serve(channel))


class _Worker:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, channel: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=channel, limit=MAX_LINE_BYTES)
        self._writer.write(encode(Ready(self._is_async)))
        while line := await reader.readline():
            message = decode(line)
            if isinstance(message, FunctionJob):
                self._jobs[message.number] = asyncio.create_task(self._run(message))
            elif isinstance(message, Cancel) and self._is_async and (task := self._jobs.get(message.number)):
                task.cancel()
        for task in self._jobs.values():
            task.cancel()
        self._writer.close()

    async def _run(self, job: FunctionJob) -> None:
        scope = _begin(job)
        context.attach(scope.enter(Context()))  # this task's own context: nothing to detach
        value: Any = None
        error: BaseException | None = None
        cancelled = False
        start_s = time.monotonic()
        try:
            value = await self._call(job.task)
        except asyncio.CancelledError:
            cancelled = True
        except Exception as raised:
            error = raised
        except (SystemExit, KeyboardInterrupt) as raised:  # ends the rollout, not the worker
            error = raised if not isinstance(raised, SystemExit) or raised.code not in (None, 0) else None
        duration_s = time.monotonic() - start_s
        _end(scope, error)
        text = None if error is None else _text(error)
        self._answer(JobOutcome(job.number, value, text, cancelled, duration_s, scope.report()))

    async def _call(self, task: JsonObject) -> Any:
        if self._is_async:
            return await self._function(task)
        value = await _in_thread(self._function, task)
        return await value if inspect.isawaitable(value) else value

    def _answer(self, outcome: JobOutcome) -> None:
        self._jobs.pop(outcome.number, None)
        assert self._writer is not None
        line = _encode(outcome)
        self._writer.write(line)


def _encode(outcome: JobOutcome) -> bytes:
    """Encodes the outcome as a line that the runner accepts.

    A value that is too long or not JSON is replaced with the start of its repr, an error with its start; rewards that
    are too many are the agent's error.
    """
    with contextlib.suppress(Exception):  # whatever the agent's own classes raise
        line = encode(outcome)
        if b"\\ud" in line:
            outcome = dataclasses.replace(
                outcome,
                value=well_formed(json.loads(json.dumps(outcome.value, default=str)), "the agent's return value"),
                error=outcome.error and escaped(outcome.error),
            )
            line = encode(outcome)
        if len(line) <= MAX_OUTCOME_BYTES:
            return line
    error = outcome.error and escaped(outcome.error[:MAX_VALUE_CHARS])
    value = None if error else escaped(shown(outcome.value)[:MAX_VALUE_CHARS])
    line = encode(dataclasses.replace(outcome, value=value, error=error))
    if len(line) <= MAX_OUTCOME_BYTES:
        return line
    report = dataclasses.replace(outcome.report, rewards=[])
    error = f"the agent gave {len(outcome.report.rewards)} rewards, too many to report; give their sum"
    return encode(dataclasses.replace(outcome, value=None, error=error, report=report))


async def _in_thread(function: Callable[..., Any], task: JsonObject) -> Any:
    """Runs the function with this task's context in a daemon thread, which cannot keep the process alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()
    carried = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        try:
            value, error = carried.run(function, task), None
        except BaseException as raised:
            value, error = None, raised if isinstance(raised, Exception) else _AgentExited(raised)
        loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="trainspan-agent", daemon=True).start()
    return await result


class _AgentExited(Exception):
    """SystemExit or KeyboardInterrupt raised by a synchronous agent."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(_text(cause))


def _begin(job: FunctionJob) -> Scope:
    identity = identity_of(job)
    parent = TraceParent.parse(job.traceparent)
    if parent is None:
        raise InvalidRecordError(f"job {job.number} has no traceparent: {job.traceparent!r}")
    base = trace.set_span_in_context(remote_span(parent), Context())
    return Scope(identity, "runner", start_span(SPAN_NAME, base, identity))


@guarded
def _end(scope: Scope, error: BaseException | None) -> None:
    scope.status = "ok" if error is None else "agent_error"
    scope.span.set_attribute(keys.ROLLOUT_CALLS, scope.calls)
    if error is not None:
        record_error(scope.span, error)
        scope.span.set_status(Status(StatusCode.ERROR, _text(error)))
    scope.span.end()


def _text(error: BaseException) -> str:
    try:
        message = " ".join(str(error).split())
    except Exception:  # of the agent's own class
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


if __name__ == "__main__":
    main()
