"""A client's connection: bounded in number, and in the time that it may be silent."""

import asyncio
from typing import ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connection"]

_MOST: Final = 256
_SILENT_S: Final = 20.0


class Connection(H11Protocol):
    """Closed if no request begins in time. If there are too many, the one that has been silent the longest is closed."""

    _silent: ClassVar[dict["Connection", asyncio.TimerHandle]] = {}
    """Connections without a request, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > _MOST:
            oldest = next(iter(self._silent))
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
        self._silent[self] = self.loop.call_later(_SILENT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if (timer := self._silent.pop(self, None)) is not None:
            timer.cancel()
