"""The judge: a function of the user's that sees task and result and gives the reward, in the runner's process."""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainspan_schemas.errors import InvalidRecordError, ProcessError, UsageError
from trainspan_schemas.functions import load_function
from trainspan_schemas.keys import REWARD
from trainspan_schemas.status import RolloutStatus

__all__ = ["Judge", "Result"]


@dataclass(frozen=True, slots=True)
class Result:
    """What the judge learns of a rollout besides its task."""

    status: RolloutStatus
    value: Any
    """The function's return value as JSON; None for a command."""
    stdout_tail: str
    """The end of what a command printed, at most 64 KiB; empty for a function."""
    exit_code: int | None
    duration_s: float
    rollout_id: str


class Judge:
    """Calls `function(task, result)`, which may be asynchronous, and checks what it gives."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """Raises UsageError where the function is not there, ProcessError where its module cannot be imported."""
        self.name = name
        try:
            self._function = load_function(name)
        except UsageError:
            raise
        except Exception as error:  # the user's code
            raise ProcessError(f"importing judge {name} failed: {type(error).__name__}: {error}") from error
        self._timeout_s = timeout_s

    async def scores(self, task: dict[str, Any], result: Result) -> dict[str, float]:
        """Evaluation name → score; empty where the judge gives none. Raises what the judge raises, or TimeoutError."""
        verdict = await asyncio.wait_for(_call(self._function, task, result), self._timeout_s)
        if verdict is None:
            return {}
        named = verdict if isinstance(verdict, dict) else {REWARD: verdict}
        return {str(name): score_of(value, f"judge {self.name}") for name, value in named.items() if value is not None}


def score_of(value: Any, giver: str) -> float:
    """The value as a score; raises InvalidRecordError where it is no finite number."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRecordError(f"{giver} gave {value!r:.80}, which is no finite number")
    return float(value)


async def _call(function: Callable[..., Any], task: dict[str, Any], result: Result) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(task, result)
    verdict = await _in_thread(function, task, result)
    return await verdict if inspect.isawaitable(verdict) else verdict


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a daemon thread: a judge that hangs must not keep the runner alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value: Any = None
        error: Exception | None = None
        try:
            value = function(*arguments)
        except SystemExit as left:
            error = RuntimeError(f"the judge called sys.exit({left.code!r})")
        except Exception as raised:  # noqa: BLE001 - the caller gets it
            error = raised
        loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="trainspan-judge", daemon=True).start()
    return await result
