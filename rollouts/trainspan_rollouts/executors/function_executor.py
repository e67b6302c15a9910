"""Executes function agents in a few worker processes, each under `opentelemetry-instrument`, that can be killed."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from trainspan_rollouts.executors.agent_process import REST_S, MemoryKills, cause_of
from trainspan_rollouts.executors.command_executor import instrumented
from trainspan_rollouts.executors.executor import Ended, Execution
from trainspan_rollouts.executors.orphans import GRACE_S, OrphanGuard
from trainspan_schemas.agents.worker import (
    MAX_OUTCOME_BYTES,
    Cancel,
    FunctionJob,
    JobOutcome,
    Ready,
    TargetRefusal,
    decode,
    encode,
)
from trainspan_schemas.errors import ProcessError, UsageError, one_line

__all__ = ["WorkerPool"]

CANCEL_GRACE_S: Final = 1.0
"""How long a canceled coroutine may take to end before its worker is killed."""
START_TIMEOUT_S: Final = 120.0
"""Limit for importing the agent's module."""

_log = logging.getLogger(__name__)


class WorkerPool:
    """Distributes executions over `workers` processes that have imported the target.

    A hanging synchronous function can only be stopped by killing its process: the other executions there end as a
    blameless `infra_error`, to be retried.
    """

    def __init__(
        self,
        target: str,
        workers: int,
        timeout_s: float,
        environ: Mapping[str, str],
        python: str,
        *,
        is_replaceable: bool = False,
    ) -> None:
        """`python` is the interpreter of the workers; trainspan must be installed in its environment.

        In a cluster the pool `is_replaceable`: if a worker cannot start again, `execute` raises ProcessError or UsageError, and
        others go on. Elsewhere that costs the rollout only.
        """
        self._target = target
        self._python = python
        self._count = workers
        self._is_replaceable = is_replaceable
        self._timeout_s = timeout_s
        self._guard = OrphanGuard()
        self._environ = {**environ, **self._guard.mark, "TRAINSPAN_BOUNDARY": "explicit"}
        self._memory = MemoryKills()
        self._slots = [asyncio.Lock() for _ in range(workers)]
        self._workers: list[_Worker | None] = [None] * workers
        self._waiting = [0] * workers

    async def start(self) -> None:
        """Starts all workers. Raises UsageError or ProcessError if the target cannot be used."""
        await asyncio.to_thread(self._guard.start)
        try:
            await asyncio.gather(*(self._worker(slot) for slot in range(self._count)))
        except OSError as error:
            raise ProcessError(self._not_started(error)) from error

    async def execute(self, execution: Execution) -> Ended:
        """Executes the function once in the least busy worker."""
        slot = min(range(self._count), key=lambda index: self._waiting[index])
        self._waiting[slot] += 1
        try:
            try:
                worker = await self._worker(slot)
            except OSError as error:
                return Ended("infra_error", 0.0, error=self._not_started(error))
            except (ProcessError, UsageError) as error:  # killed as it began, or its code was changed meanwhile
                if self._is_replaceable:
                    raise
                return Ended("infra_error", 0.0, error=f"cannot start a worker again: {error}")
            return await worker.execute(execution, execution.time_left(self._timeout_s))
        finally:
            self._waiting[slot] -= 1

    async def release(self, execution: Execution) -> None:
        """Nothing: a function has no folder."""

    async def close(self) -> None:
        """Lets the workers flush and exit; kills those that do not."""
        live = [worker for worker in self._workers if worker is not None]
        await asyncio.gather(*(worker.close() for worker in live))
        await asyncio.to_thread(self._guard.close)

    def _not_started(self, error: OSError) -> str:
        return f"cannot start a worker for {self._target}: {cause_of(error)}"

    async def _worker(self, slot: int) -> "_Worker":
        async with self._slots[slot]:
            worker = self._workers[slot]
            if worker is None or worker.is_lost:
                worker = await _Worker.start(self._target, self._environ, self._python, self._memory)
                self._workers[slot] = worker
            return worker


class _Worker:
    """One process and its running executions."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_async: bool,
        memory: MemoryKills,
    ) -> None:
        self._process = process
        self._memory, self._kills = memory, memory.count()
        self._writer = writer
        self._is_async = is_async
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[JobOutcome | Ended]] = {}
        self._listener = asyncio.create_task(self._listen(reader))
        self._closer = asyncio.create_task(_close_after(process, writer))
        self.is_lost = False

    @classmethod
    async def start(cls, target: str, environ: Mapping[str, str], python: str, memory: MemoryKills) -> "_Worker":
        """Returns a worker that is ready. Raises UsageError or ProcessError if the target cannot be used."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = instrumented([python, "-m", "trainspan._worker", "--fd", str(theirs.fileno()), target], environ)
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_OUTCOME_BYTES)
        closer = asyncio.create_task(_close_after(process, writer))
        try:
            line = await asyncio.wait_for(reader.readline(), START_TIMEOUT_S)
            message = decode(line) if line else None
        except ValueError as error:
            message = TargetRefusal(f"the worker for {target} wrote {one_line(error)}", usage=False)
        except TimeoutError:
            message = TargetRefusal(f"importing {target} took more than {START_TIMEOUT_S:.0f} s", usage=False)
        except BaseException:
            await asyncio.shield(_kill(process))
            raise
        finally:
            closer.cancel()
        if isinstance(message, Ready):
            return cls(process, reader, writer, message.is_async, memory)
        writer.close()
        await _kill(process)
        if isinstance(message, TargetRefusal):
            raise (UsageError if message.usage else ProcessError)(message.message)
        raise ProcessError(f"the worker for {target} exited with code {process.returncode} during startup")

    async def execute(self, execution: Execution, timeout_s: float) -> Ended:
        number = next(self._numbers)
        answer: asyncio.Future[JobOutcome | Ended] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        start_s = time.monotonic()
        job = FunctionJob(number, execution.task.for_agent(), execution.identity.members(), str(execution.parent))
        self._writer.write(encode(job))
        try:
            done, _ = await asyncio.wait([answer], timeout=timeout_s)
            if not done:
                await self._stop_late(number, answer)
                self._answers.pop(number, None)
                return Ended("timeout", time.monotonic() - start_s, error=f"timed out after {timeout_s:g} s")
        except asyncio.CancelledError:
            self._answers.pop(number, None)
            self._say(Cancel(number))
            raise
        return _ended(answer.result())

    async def close(self) -> None:
        """Closes the channel; the process sends its spans and exits."""
        self.is_lost = True
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), GRACE_S)
        except TimeoutError:
            await _kill(self._process)
        self._listener.cancel()
        self._closer.cancel()
        await asyncio.gather(self._listener, self._closer, return_exceptions=True)

    async def _stop_late(self, number: int, answer: "asyncio.Future[Any]") -> None:
        """Cancels a coroutine; kills the worker if that does not help or the function is synchronous."""
        if self._is_async:
            self._say(Cancel(number))
            done, _ = await asyncio.wait([answer], timeout=CANCEL_GRACE_S)
            if done:
                return
        if not self.is_lost:
            _log.warning("event=worker_killed pid=%d reason=hung others=%d", self._process.pid, len(self._answers) - 1)
            self._answers.pop(number, None)
            self._lose(Ended("infra_error", 0.0, error="another rollout hung in the same worker", blameless=True))
            await asyncio.shield(_kill(self._process))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Takes outcomes until the worker ends, or writes what is none, as an agent in it can."""
        wrote = ""
        try:
            while line := await reader.readline():
                message = decode(line)
                if not isinstance(message, JobOutcome):
                    continue
                answer = self._answers.pop(message.number, None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except (ConnectionError, ValueError) as error:
            wrote = f" after it wrote {one_line(error)}" if isinstance(error, ValueError) else ""
        if not self.is_lost:
            self._lose(await self._death(wrote))

    async def _death(self, wrote: str) -> Ended:
        """How the executions of a worker that died end; ends its children.

        If it had only one and memory was left, that one's; otherwise nobody knows whose, so they are tried again first.
        """
        self.is_lost = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), CANCEL_GRACE_S)
        await _kill(self._process)
        code = self._process.returncode
        error = f"the worker died with code {code}{wrote}"
        is_short_of_memory = code == -signal.SIGKILL and not wrote and self._memory.explain(self._kills)
        if is_short_of_memory:  # an agent in it may have taken all of it
            error = f"{error}, for lack of memory"
        asks_again = is_short_of_memory or len(self._answers) > 1
        return Ended("agent_error", 0.0, exit_code=code, error=error, asks_again=asks_again)

    def _lose(self, ended: Ended) -> None:
        self.is_lost = True
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_result(ended)

    def _say(self, message: Cancel) -> None:
        if not self.is_lost:
            self._writer.write(encode(message))


def _ended(answer: JobOutcome | Ended) -> Ended:
    if isinstance(answer, Ended):
        return answer
    if answer.cancelled:
        return Ended("agent_error", answer.duration_s, error="the agent cancelled itself", report=answer.report)
    if answer.error is None:
        return Ended("ok", answer.duration_s, value=answer.value, report=answer.report)
    return Ended("agent_error", answer.duration_s, error=answer.error, report=answer.report)


async def _close_after(process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
    """Ends the reading from a worker that has ended: a child that it forked holds the channel too."""
    await process.wait()
    await asyncio.sleep(REST_S)
    writer.close()


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Sends the whole group SIGTERM, so that spans are sent, then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), wait_s)
            if number == signal.SIGKILL:
                return
