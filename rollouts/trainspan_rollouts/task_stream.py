"""Tasks that arrive on standard input while the run is in progress: JSON lines, as in a task file."""

import asyncio
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Final

from trainspan_rollouts.task_file import Task, task_fields, to_task
from trainspan_schemas.errors import TaskFileError

__all__ = ["STDIN", "TaskStream"]

STDIN: Final = Path("-")
"""The task file's name that stands for standard input."""
_MAX_WAITING: Final = 64
"""Lines that are read ahead of the rollouts."""


class TaskStream:
    """Reads lines in a thread. A line may name the task's `round`; a task id occurs once in a round."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._waiting: asyncio.Queue[bytes | OSError | None] = asyncio.Queue(_MAX_WAITING)
        self._number = 0
        self._seen: set[int] = set()
        """Hashes of round and task id: 8 bytes each instead of the text."""
        self._started = False

    async def next(self, round_: int) -> tuple[Task, int] | None:
        """The next task and its round (`round_` if the line names none); None at the end of the input.

        Raises TaskFileError, with the number of the line that is not a task or repeats one.
        """
        if not self._started:
            self._started = True
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._read, args=(loop,), name="task-stream", daemon=True).start()
        while (line := await self._waiting.get()) is not None:
            if isinstance(line, OSError):
                raise TaskFileError(f"standard input cannot be read: {line.strerror}")
            self._number += 1
            if line.strip():
                return self._parsed(line, round_)
        self._waiting.put_nowait(None)  # for the next caller
        return None

    def _parsed(self, line: bytes, round_: int) -> tuple[Task, int]:
        where = f"standard input:{self._number}"
        fields = task_fields(where, line)
        given = fields.pop("round", round_)
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 2**31:
            raise TaskFileError(f"{where}: round {given!r} is not a number from 0")
        task = to_task(where, fields)
        key = hash((given, task.id))
        if key in self._seen:
            raise TaskFileError(f"{where}: the id {task.id!r} occurs a second time in round {given}")
        self._seen.add(key)
        return task, given

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with open(self._descriptor, "rb", closefd=False) as lines:  # sys.stdin is locked while a thread reads it
                for line in lines:
                    asyncio.run_coroutine_threadsafe(self._waiting.put(line), loop).result()
            asyncio.run_coroutine_threadsafe(self._waiting.put(None), loop).result()
        except OSError as error:
            asyncio.run_coroutine_threadsafe(self._waiting.put(error), loop)
        except (RuntimeError, CancelledError):  # the run has ended
            return
