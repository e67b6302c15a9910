"""Calls that wait in memory for the sending thread, oldest first, bounded by number and by bytes."""

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice

from trainspan_serving.export.call_span import CallSpan

__all__ = ["CallQueue"]

_BATCH_CALLS = 512
_BATCH_BYTES = 2 * 1024 * 1024


class CallQueue:
    """A queue that any thread fills and one thread empties, in batches of at most 512 calls or 2 MiB."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._calls: deque[CallSpan] = deque()
        self._bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def put(self, call: CallSpan) -> bool:
        """Adds a call; False if the queue is full or closed. Never blocks."""
        size = call.size_bytes
        with self._changed:
            if self._is_closed or len(self._calls) >= self._max_calls or self._bytes + size > self._max_bytes:
                return False
            self._calls.append(call)
            self._bytes += size
            self._changed.notify()
            return True

    def close(self) -> None:
        """Takes no more calls, and ends every wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_closed(self, timeout_s: float) -> None:
        """Waits until the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, timeout_s)

    def batch(self, wait_s: float | None, delay_s: float) -> list[CallSpan]:
        """Returns the oldest calls, which stay queued until they are removed.

        Waits up to `wait_s` for a call (None: without limit), then up to `delay_s` for a full batch; empty if there is
        no call by then.
        """
        with self._changed:
            if not self._calls and not self._is_closed:
                self._changed.wait(wait_s)
            if self._calls:
                self._changed.wait_for(lambda: self._is_closed or len(self._calls) >= _BATCH_CALLS, delay_s)
            batch: list[CallSpan] = []
            size = 0
            for call in islice(self._calls, _BATCH_CALLS):
                size += call.size_bytes
                if batch and size > _BATCH_BYTES:
                    break
                batch.append(call)
            return batch

    def remove(self, batch: Sequence[CallSpan]) -> None:
        """Removes a batch from the front of the queue."""
        with self._changed:
            for call in batch:
                self._calls.popleft()
                self._bytes -= call.size_bytes

    def clear(self) -> int:
        """Removes all calls and returns their number."""
        with self._changed:
            count = len(self._calls)
            self._calls.clear()
            self._bytes = 0
            return count
