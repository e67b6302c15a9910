"""The judge: a user's function that gets task and result and returns the reward, in the runner's process."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspan_schemas.agents.functions import load_function, number_of
from trainspan_schemas.agents.invocation import Invoker
from trainspan_schemas.telemetry.keys import REWARD
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["Judge", "Result"]


@dataclass(frozen=True, slots=True)
class Result:
    """The judge's view of a rollout, next to its task."""

    status: RolloutStatus
    value: Any
    """The function's return value as JSON; None for a command."""
    stdout_tail: str
    """The end of a command's standard output, at most 64 KiB; empty for a function."""
    exit_code: int | None
    duration_s: float
    rollout_id: str
    workdir: Path | None = None
    """A harness's work folder as it was left; None for other agents, and on a Ray cluster unless workspaces are kept."""


class Judge:
    """Calls `function(task, result)`, sync or async, several at once, and checks its return value."""

    def __init__(self, name: str, concurrency: int, timeout_s: float) -> None:
        """Raises UsageError if the function is missing or takes other arguments, ProcessError if its module raises."""
        self.name = name
        function = load_function(name, "task", "result", may_be_async=True)
        self._invoker = Invoker(function, "trainspan-judge")
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout_s = timeout_s

    async def scores(self, task: dict[str, Any], result: Result) -> tuple[dict[str, float], str | None]:
        """Returns evaluation name → score, empty if there is none, and the judge's reason.

        A judge returns a number, a dict of numbers, None, or one of these with a text: `return 0.5, "the date is wrong"`.
        Raises what the judge raises, or TimeoutError.

        A call that hangs frees its slot at the timeout.
        """
        async with self._slots:
            call = asyncio.wrap_future(self._invoker.start(task, result))
            try:
                verdict = await asyncio.wait_for(call, self._timeout_s)
            except TimeoutError:
                if not call.cancelled():
                    raise  # the judge's own
                raise TimeoutError(f"no verdict within {self._timeout_s:g} s ([rollouts] judge_timeout_s)") from None
        is_pair = isinstance(verdict, tuple) and len(verdict) == 2 and isinstance(verdict[1], str)
        verdict, reason = verdict if is_pair else (verdict, None)
        named = verdict if isinstance(verdict, dict) else {REWARD: verdict}
        giver = f"judge {self.name}"
        return {str(name): number_of(value, giver) for name, value in named.items() if value is not None}, reason

    def close(self) -> None:
        """Ends the remaining asynchronous calls."""
        self._invoker.close()
