"""The judge: gets task and result and returns the reward, in the runner's process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.agents.functions import number_of
from trainspan_schemas.agents.invocation import Invoker
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.keys import REWARD
from trainspan_schemas.telemetry.status import RolloutStatus
from trainspan_schemas.telemetry.utf8 import escaped

__all__ = ["Judge", "JudgeFunction", "Judgment", "Result"]

_MAX_SCORES: Final = 1_000
_MAX_NAME: Final = 256
"""Characters. Together the largest verdict stays below what a collector takes in one request."""


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


@dataclass(frozen=True, slots=True)
class JudgeFunction:
    """What a judge's name stands for."""

    name: str
    function: Callable[..., Any]
    """`function(task, result)`, or `function(task, results)` if it compares; sync or async."""
    digest: str
    """sha256 of what decides its verdicts; another one is another judge."""
    compares: bool = False
    """Whether it judges all rollouts of a group together."""
    secrets: frozenset[str] = frozenset()
    """Environment variables that no agent may get."""
    figures: Callable[[], Mapping[str, float]] = dict
    """What it counted so far."""


@dataclass(frozen=True, slots=True)
class Judgment:
    """A judge's verdict on one rollout."""

    scores: dict[str, float]
    """Evaluation name → score; empty if it gives none."""
    reasons: dict[str, str]
    """Evaluation name → the judge's reason; that of `reward` also if there is no score."""


class Judge:
    """Calls a judge's function, several calls at once, and checks its return values."""

    def __init__(self, judge: JudgeFunction, concurrency: int, timeout_s: float) -> None:
        self.name, self.digest, self.compares = judge.name, judge.digest, judge.compares
        self.secrets, self.figures = judge.secrets, judge.figures
        self._invoker = Invoker(judge.function, "trainspan-judge")
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout_s = timeout_s
        self.verdicts = 0
        """Rollouts that it was asked about."""

    async def judge(self, task: Mapping[str, Any], result: Result) -> Judgment:
        """The verdict on one rollout.

        A judge returns a number, a dict of numbers, None, or one of these with a text, `return 0.5, "the date is wrong"`, or with
        a dict of texts by name. Raises what the judge raises, InvalidRecordError for other values, or TimeoutError.
        """
        self.verdicts += 1
        return self._judgment(await self._call(task, result))

    async def judge_group(self, task: Mapping[str, Any], results: Sequence[Result]) -> list[Judgment]:
        """The verdicts on rollouts of one task, in their order: a judge that compares returns a list of such values."""
        self.verdicts += len(results)
        verdicts = await self._call(task, list(results))
        if not isinstance(verdicts, Sequence) or isinstance(verdicts, str) or len(verdicts) != len(results):
            raise InvalidRecordError(
                f"it returned {verdicts!r:.80}; for {len(results)} results it must return a list of {len(results)} verdicts"
            )
        return [self._judgment(verdict) for verdict in verdicts]

    async def _call(self, *arguments: Any) -> Any:
        """A call that hangs frees its slot at the timeout."""
        async with self._slots:
            call = asyncio.wrap_future(self._invoker.start(*arguments))
            try:
                return await asyncio.wait_for(call, self._timeout_s)
            except TimeoutError:
                if not call.cancelled():
                    raise  # the judge's own
                raise TimeoutError(f"no verdict within {self._timeout_s:g} s ([rollouts] judge_timeout_s)") from None

    def _judgment(self, verdict: Any) -> Judgment:
        is_pair = isinstance(verdict, tuple) and len(verdict) == 2 and isinstance(verdict[1], (str, Mapping))
        verdict, reason = verdict if is_pair else (verdict, {})
        by_name = verdict if isinstance(verdict, Mapping) else {REWARD: verdict}
        giver = f"judge {self.name}"
        if len(by_name) > _MAX_SCORES:
            raise InvalidRecordError(f"{giver} gave {len(by_name)} scores; a verdict has at most {_MAX_SCORES}")
        scores = {_named(name, giver): number_of(value, giver) for name, value in by_name.items() if value is not None}
        if isinstance(reason, str):
            return Judgment(scores, dict.fromkeys(scores or (REWARD,), reason))
        return Judgment(scores, {escaped(str(name)): str(text) for name, text in reason.items()})

    def close(self) -> None:
        """Ends the remaining asynchronous calls."""
        self._invoker.close()


def _named(name: Any, giver: str) -> str:
    text = escaped(str(name))
    if len(text) > _MAX_NAME:
        raise InvalidRecordError(
            f"{giver} gave a score a name of {len(text)} characters; at most {_MAX_NAME} are possible"
        )
    return text
