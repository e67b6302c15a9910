"""The server's own failures by attempt, for the runner: an agent that claims one could only be hiding its own.

A caller can make a request that vLLM answers with 500. It counts only if an engine was at work on it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from trainspan_serving.capture.caller import Caller
from trainspan_serving.http.asgi import Message, Send

__all__ = ["FailureLog"]

MAX_ATTEMPTS: Final = 10_000
_REFUSALS: Final = (429, 503)


class FailureLog:
    """Counts the failed requests of signed callers by the key that their calls are counted under.

    Of more than MAX_ATTEMPTS keys with failures the oldest are forgotten. For one event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._failures: OrderedDict[str, int] = OrderedDict()

    @property
    def up_s(self) -> float:
        """Seconds since the server was started."""
        return self._clock() - self._began_s

    def count(self, keys: Iterable[str]) -> int:
        return sum(self._failures.get(key, 0) for key in keys)

    def add(self, caller: Caller) -> None:
        key = caller.counter_key
        if not caller.is_signed or key is None:
            return
        self._failures[key] = self._failures.get(key, 0) + 1
        self._failures.move_to_end(key)
        if len(self._failures) > MAX_ATTEMPTS:
            self._failures.popitem(last=False)

    def watched(self, caller: Caller, send: Send, is_at_work: Callable[[], bool] = lambda: False) -> Send:
        """`send`, with which the status of the answer is seen. `is_at_work`: whether an engine was at work on the request."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                if status in _REFUSALS or (status >= 500 and is_at_work()):
                    self.add(caller)
            await send(message)

        return watched
