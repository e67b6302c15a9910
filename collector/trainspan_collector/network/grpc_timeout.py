"""Timeouts for gRPC calls whose sender or reader stalls: without them, a few could hold every worker."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc

__all__ = ["MessageTimeout"]

_LOOK_S: Final = 0.25


@dataclass(slots=True)
class _Wait:
    context: grpc.ServicerContext
    since: float
    is_over: bool = False
    """The call was canceled, since nothing arrived in time."""


class MessageTimeout:
    """Cancels calls after waiting for `limit_s` or a little more. Thread-safe; one thread for all, until `close`."""

    def __init__(self, limit_s: float, *, crowd: int | None = None, crowd_s: float = 1.0) -> None:
        """If `crowd` or more calls wait, those that have waited for `crowd_s` are canceled."""
        self._limit_s = limit_s
        self._crowd = crowd
        self._crowd_s = crowd_s
        self._waits: dict[int, _Wait] = {}
        self._lock = threading.Lock()
        self._in_use = threading.Event()
        """Some call has waited since the last look. A collector has ten of these threads: idle ones must not wake up."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="grpc-timeout", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def waiting(self, context: grpc.ServicerContext) -> Iterator[_Wait]:
        """Marks the call as waiting for the other side during the block."""
        wait = _Wait(context, time.monotonic())
        with self._lock:
            self._waits[id(wait)] = wait
            if not self._in_use.is_set():
                self._in_use.set()
        try:
            yield wait
        finally:
            with self._lock:
                del self._waits[id(wait)]

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._in_use.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._in_use.wait() and not self._closed.wait(min(_LOOK_S, self._limit_s / 20)):
            with self._lock:
                waits = list(self._waits.values())
                if not waits and not self._closed.is_set():
                    self._in_use.clear()
            is_crowded = self._crowd is not None and len(waits) >= self._crowd
            before = time.monotonic() - (min(self._crowd_s, self._limit_s) if is_crowded else self._limit_s)
            for wait in waits:
                if wait.since <= before and not wait.is_over:
                    wait.is_over = True
                    wait.context.cancel()
