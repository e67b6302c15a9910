"""The trainer's side of the grammar process: started when needed, killed when it takes too long."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainspan_training.constraints.replay_worker import Answer, Request, read_message, write_message

__all__ = ["Completion", "Masks", "ReplayError", "ReplayProcess"]

Completion = tuple[NDArray[np.int32], int]
"""Its tokens (C,), and the number of tokens before the first masked one."""
Masks = tuple[NDArray[np.uint32], NDArray[np.int32]]
"""Masks (k, W) not seen in earlier completions, and for each token (C,) the index among all masks so far, or −1."""

_SILENCE_S = 300.0
"""Least time to wait for an answer: the process limits itself, by CPU time."""
_SILENCE = 15.0
"""Time to wait for an answer, as a multiple of the CPU time limit: other processes use the CPU too."""
_END_S = 5.0
_ENDS = {
    "slow": "it took too much time",
    "failed": "the library crashed, or ran out of memory",
    "too_many_masks": "its masks take too much memory",
}
_READ_BYTES = 2**20


class ReplayError(Exception):
    """A constraint cannot be replayed; `name` is the reason."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class ReplayProcess:
    """Runs `replay_worker`, and restarts it each time it had to be killed."""

    def __init__(self, tokenizer: bytes, *, max_bytes: int, max_mask_bytes: int) -> None:
        """`tokenizer`: as serialized by xgrammar. A grammar gets `max_bytes` of memory, its masks `max_mask_bytes`."""
        self._tokenizer = tokenizer
        self._max_bytes, self._max_mask_bytes = max_bytes, max_mask_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._broken: ReplayError | None = None
        """The error that keeps it from starting."""
        self._silence_s = _SILENCE_S

    def replay(
        self, constraint: str, completions: Sequence[Completion], limit_s: float
    ) -> Generator[Masks | ReplayError, None, None]:
        """Yields the masks of each completion under this constraint, or the error that prevented its replay.

        Raises ReplayError if all remaining completions fail. Compiling, and each completion, may take `limit_s` of CPU
        time.
        """
        request: Request = {
            "constraint": constraint,
            "calls": [(len(ids), free) for ids, free in completions],
            "limit_s": limit_s,
            "max_bytes": self._max_bytes,
            "max_mask_bytes": self._max_mask_bytes,
        }
        self._silence_s = max(_SILENCE_S, _SILENCE * limit_s)
        payload = b"".join(ids.astype(np.int32).tobytes() for ids, _ in completions)
        if error := self._ask(request, payload).get("error"):
            self._finish()
            raise ReplayError("not_compiled", str(error))
        finished = False
        try:
            for ids, _ in completions:
                answer, data = self._read()
                yield _masks(answer, data, len(ids))
            self._finish()
            finished = True
        except ReplayError:
            finished = True
            raise
        finally:
            if not finished:  # unread answers remain
                self.close()

    def close(self) -> None:
        """Kills the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its child too
            process.wait(_END_S)
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if stream:
                        stream.close()

    def _ask(self, request: Request, payload: bytes) -> Answer:
        if self._broken:
            raise self._broken
        if self._process is None:
            self._start()
        try:
            self._write(request, payload)
        except OSError as error:
            raise self._ended() from error
        return self._read()[0]

    def _start(self) -> None:
        command = [sys.executable, "-m", "trainspan_training.constraints.replay_worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # read after the process has ended
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        try:
            self._write({}, self._tokenizer)
            self._read()
        except (OSError, ReplayError):
            self._broken = self._ended()
            raise self._broken from None

    def _finish(self) -> None:
        """Reads the last message about a grammar, even if its child failed after the last answer."""
        with contextlib.suppress(ReplayError):
            self._read()

    def _write(self, header: Mapping[str, object], payload: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        write_message(self._process.stdin, header, payload)

    def _read(self) -> tuple[Answer, bytes | bytearray]:
        """Reads the next message. Raises ReplayError if there is none, or if it reports a failure."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + self._silence_s

        def read(size: int) -> bytearray:
            parts = bytearray()
            while len(parts) < size:
                if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError
                part = os.read(descriptor, min(size - len(parts), _READ_BYTES))
                if not part:
                    break
                parts += part
            return parts

        try:
            message = read_message(read)
        except TimeoutError as error:
            self.close()
            raise ReplayError("slow", f"no answer within {self._silence_s:g} s") from error
        if message is None:
            raise self._ended()
        if why := message[0].get("ended"):
            raise ReplayError(why, _ENDS[why])
        return message

    def _ended(self) -> ReplayError:
        self.close()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        return ReplayError("failed", f"the grammar process ended: {last[:200]}")


def _masks(answer: Answer, data: bytes | bytearray, tokens: int) -> Masks | ReplayError:
    if error := answer.get("error"):
        return ReplayError("not_reproduced", str(error))
    edge, new = len(data) - 4 * tokens, answer.get("masks", 0)
    bits = np.frombuffer(data[:edge], dtype=np.uint32)
    return bits.reshape(new, len(bits) // max(1, new)), np.frombuffer(data[edge:], dtype=np.int32)
