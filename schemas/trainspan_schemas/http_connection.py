"""A client's connection to a server of ours (uvicorn): bounded in number, and in the time that it may be silent."""

import asyncio
import math
from typing import ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BoundedConnection"]

SILENT_S: Final = 20.0


class BoundedConnection(H11Protocol):  # h11 bounds the size of headers, which httptools does not
    """Closed if no request begins in time. If there are too many, the one that has been silent the longest is closed."""

    most: ClassVar[int] = 256
    _silence: asyncio.TimerHandle | None = None
    """Ends the connection; None while a request is answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self.most:
            others = [other for other in self.connections if isinstance(other, BoundedConnection)]
            oldest = min(others, key=lambda other: other._silence.when() if other._silence else math.inf)
            oldest._stop_waiting()
            oldest.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering():  # else the next request has already arrived
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._stop_waiting()
        self._silence = self.loop.call_later(SILENT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
