"""The server's own failures by trace, for the runner: an agent that claims one could only be hiding its own."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from trainspan_schemas.telemetry.failures import RequestFailures
from trainspan_serving.capture.caller import Caller
from trainspan_serving.http.asgi import Message, Send

__all__ = ["FailureLog"]

MAX_TRACES: Final = 10_000


class FailureLog:
    """Counts the requests of signed callers that were answered with 429 or 5xx, or not to their end, by trace.

    Of more than MAX_TRACES traces with failures the oldest are forgotten. For one event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._failures: OrderedDict[str, int] = OrderedDict()

    def of(self, trace_id: str) -> RequestFailures:
        return RequestFailures(self._failures.get(trace_id, 0), self._clock() - self._began_s)

    def add(self, caller: Caller) -> None:
        if not caller.is_signed or caller.trace_id is None:
            return
        self._failures[caller.trace_id] = self._failures.get(caller.trace_id, 0) + 1
        self._failures.move_to_end(caller.trace_id)
        if len(self._failures) > MAX_TRACES:
            self._failures.popitem(last=False)

    def watched(self, caller: Caller, send: Send) -> Send:
        """`send`, with which the status of the answer is seen."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and (message["status"] == 429 or message["status"] >= 500):
                self.add(caller)
            await send(message)

        return watched
