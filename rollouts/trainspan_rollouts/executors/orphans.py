"""Ends the agents of a process that was killed: `python orphans.py MARK`, which waits for the end of its standard input.

Agents carry the mark in their environment, which their children inherit. The guard has a session of its own, an empty
environment, and no living parent, so that what kills the runner does not kill the guard: a Ray worker that ends kills its
children. It uses the standard library only.
"""

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

__all__ = ["OrphanGuard"]

MARK_VARIABLE: Final = "TRAINSPAN_RUNNER_PROCESS"
GRACE_S: Final = 3.0
"""Time between SIGTERM and SIGKILL, in which an instrumented agent sends its spans."""
POLL_S: Final = 0.1
KILLS: Final = 100
"""A process may start others between two looks; one that the kernel cannot end is given up."""


class OrphanGuard:
    """Ends all processes with the mark once this process has ended, however that happened, or called `close`."""

    def __init__(self) -> None:
        self.mark = {MARK_VARIABLE: secrets.token_hex(16)}
        """Environment of the agents."""
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.mark[MARK_VARIABLE]],
            env={},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guard.wait()  # for the parent of the guard

    def close(self) -> None:
        """Ends what is left, for which it takes at most about twice the grace period."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        self._guard.stdin.close()
        select.select([self._guard.stdout], [], [], 2 * GRACE_S)  # readable once the guard has ended
        self._guard.stdout.close()


def end_marked(mark: str) -> None:
    """Sends SIGTERM to the process groups with the mark, then SIGKILL to those that are left."""
    _signal_groups(mark, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for _ in range(KILLS):
        if not _signal_groups(mark, signal.SIGKILL):
            return
        time.sleep(POLL_S)


def _signal_groups(mark: str, number: signal.Signals) -> set[int]:
    """Signals whole groups, since a group's leader is an agent; returns them."""
    groups = set()
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            groups.add(os.getpgid(pid))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
    return groups


def _marked(mark: str) -> list[int]:
    """The processes of this user that were started with the mark in their environment."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
    return pids


if __name__ == "__main__":
    if os.fork() == 0:
        sys.stdin.buffer.read()
        end_marked(sys.argv[1])
