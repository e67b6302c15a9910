"""Failure of a team: all processes end with the first error that any of them raises.

A process may wait forever in a collective operation with a failed one. So an error is reported out of band, through the
store by which the processes found each other. A process that does not end by itself is killed.
"""

import json
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from trainspan_schemas import errors
from trainspan_schemas.errors import TrainingError, TrainspanError

__all__ = ["Failures", "failed_in"]

log = logging.getLogger(__name__)

_POLL_S = 0.25
_RECEIPT_S = 5.0
"""How long the leader, whose process holds the store, waits for the others to receive its error."""
_GRACE_S = 30.0
"""Time that a process has to end after an error."""
_CONNECT = timedelta(seconds=60)
_MOST = 500
"""Maximum length of an unexpected error: some are pages long, and it is reported in one line."""
_ORIGIN = "_trainspan_rank"


def failed_in(rank: int, error: Exception) -> Exception:
    """Marks the error as that process's, whichever process raises it."""
    setattr(error, _ORIGIN, rank)
    return error


class Failures:
    """Reports and receives errors as process `rank` of `size`; torch's store is at MASTER_ADDR:MASTER_PORT."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._error_key, self._received_key = f"trainspan/{start}/error", f"trainspan/{start}/received"
        self._store, self._listening_store = _connect(), _connect()
        self._received: TrainspanError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="failures", daemon=True)
        self._thread.start()

    def first(self, error: Exception) -> Exception:
        """Reports this process's error to the others and returns the one that was reported first."""
        report = _text_of(error, self._rank, self._size)
        try:
            stored = self._store.compare_set(self._error_key, "", report).decode()
        except RuntimeError:  # the leader is gone, and so is the store
            self._thread.join(2 * _POLL_S)
            return self._received or error
        mine = stored == report and getattr(error, _ORIGIN, self._rank) == self._rank
        if mine and not isinstance(error, TrainspanError):
            log.error("%s", _error_of(report), exc_info=error)
        if self._rank == 0:
            self._await_receipt()
        return _error_of(stored)

    def close(self) -> None:
        """Stops listening; not called after an error, so that this process is killed if it does not end."""
        self._over.set()
        self._thread.join()

    def _await_receipt(self) -> None:
        until = time.monotonic() + _RECEIPT_S
        while time.monotonic() < until and self._store.add(self._received_key, 0) < self._size:
            time.sleep(_POLL_S)

    def _listen(self) -> None:
        while not self._over.wait(_POLL_S):
            try:
                if self._listening_store.check([self._error_key]):
                    self._received = _error_of(self._listening_store.get(self._error_key).decode())
                    self._listening_store.add(self._received_key, 1)
                    break
            except RuntimeError:  # the leader is gone
                return
        else:
            return
        if not self._over.wait(_GRACE_S):
            sys.stderr.write(f"trainspan: {self._received}\n")
            sys.stderr.flush()
            os._exit(1)


def _connect() -> Any:
    import torch.distributed as dist

    open_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # documented, and not exported explicitly
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return open_store(address, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)


def _text_of(error: Exception, rank: int, size: int) -> str:
    if isinstance(error, TrainspanError):
        return json.dumps([type(error).__name__, str(error)])
    text = f"process {getattr(error, _ORIGIN, rank) + 1} of {size} failed: {type(error).__name__}: {' '.join(str(error).split())[:_MOST]}"
    return json.dumps([TrainingError.__name__, text])


def _error_of(stored: str) -> TrainspanError:
    kind, text = json.loads(stored)
    error_type: Any = getattr(errors, kind, TrainingError)
    return error_type(text)  # type: ignore[no-any-return]
