"""The server's own failures and its refusals by attempt, for the runner: an agent that claims one could only be hiding its own.

A caller can make a request that vLLM answers with 500. It counts only if an engine was at work on it.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from trainspan_serving.capture.caller import Caller
from trainspan_serving.http.asgi import Message, Send

__all__ = ["FailureLog", "Refusals"]

MAX_ATTEMPTS: Final = 10_000
_OVERLOADED: Final = (429, 503)
_MAX_REASON: Final = 500
"""Characters of a reason."""
_MAX_ANSWER: Final = 16 * 1024
"""Bytes of a refusal that are looked at."""
_OVERFLOW: Final = ("maximum context length", "longer than the maximum model length")
"""What vLLM says of a prompt that does not fit."""


@dataclass(slots=True)
class Refusals:
    """The requests of one attempt, or of several together, that got no answer."""

    failures: int = 0
    """By the server's own fault."""
    overflows: int = 0
    """Because the prompt does not fit into the context."""
    reason: str | None = None
    """Of the last one."""


class FailureLog:
    """Notes the requests of signed callers that got no answer, by the key that their calls are counted under.

    Of more than MAX_ATTEMPTS keys the oldest are forgotten. For one event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._attempts: OrderedDict[str, Refusals] = OrderedDict()

    @property
    def up_s(self) -> float:
        """Seconds since the server was started."""
        return self._clock() - self._began_s

    def of(self, keys: Iterable[str]) -> Refusals:
        """The refusals of these keys together."""
        known = [self._attempts[key] for key in set(keys) if key in self._attempts]
        return Refusals(
            sum(each.failures for each in known),
            sum(each.overflows for each in known),
            next((each.reason for each in known if each.reason), None),
        )

    def add(self, caller: Caller) -> None:
        """Counts a failure of the server."""
        if (attempt := self._attempt(caller)) is not None:
            attempt.failures += 1

    def watched(self, caller: Caller, send: Send, is_at_work: Callable[[], bool] = lambda: False) -> Send:
        """`send`, with which the status of the answer is seen. `is_at_work`: whether an engine was at work on the request."""
        refusal: bytearray | None = None

        async def watched(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start":
                status = message["status"]
                if status in _OVERLOADED or (status >= 500 and is_at_work()):
                    self.add(caller)
                refusal = bytearray() if status >= 400 else None
            elif refusal is not None:
                refusal.extend(message.get("body", b"")[: _MAX_ANSWER - len(refusal)])
                if not message.get("more_body", False):
                    self._note(caller, bytes(refusal))
            await send(message)

        return watched

    def _note(self, caller: Caller, answer: bytes) -> None:
        if (attempt := self._attempt(caller)) is not None:
            attempt.reason = _reason(answer)
            attempt.overflows += any(words in attempt.reason for words in _OVERFLOW)

    def _attempt(self, caller: Caller) -> Refusals | None:
        key = caller.counter_key
        if not caller.is_signed or key is None:
            return None
        attempt = self._attempts.setdefault(key, Refusals())
        self._attempts.move_to_end(key)
        if len(self._attempts) > MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        return attempt


def _reason(answer: bytes) -> str:
    """The message in an error of OpenAI's or Anthropic's form, or of ours; otherwise the beginning of the answer."""
    text = answer.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return " ".join(str(text).split())[:_MAX_REASON]
