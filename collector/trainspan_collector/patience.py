"""An end to gRPC calls whose message does not come: without it a few silent senders could hold every worker."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

__all__ = ["Patience"]


@dataclass(slots=True)
class _Wait:
    context: grpc.ServicerContext
    until: float
    is_over: bool = False
    """The call was ended, since nothing came in time."""


class Patience:
    """Cancels calls after `limit_s` of waiting or a little more. Thread-safe; one thread for all, until `close`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waits: dict[int, _Wait] = {}  # in order of `until`
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def waiting(self, context: grpc.ServicerContext) -> Iterator[_Wait]:
        """For the time of the block the call waits for its sender."""
        wait = _Wait(context, time.monotonic() + self._limit_s)
        with self._lock:
            self._waits[id(wait)] = wait
        try:
            yield wait
        finally:
            with self._lock:
                del self._waits[id(wait)]

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._limit_s / 20):
            now = time.monotonic()
            with self._lock:
                over = [wait for wait in self._waits.values() if wait.until <= now and not wait.is_over]
            for wait in over:
                wait.is_over = True
                wait.context.cancel()
