"""Child processes of the loop: long-lived services with a log file each, and commands that end with a result."""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from trainspan_schemas.command_events import Event, parse
from trainspan_schemas.errors import InvalidRecordError, ProcessError

__all__ = ["Commands", "Service"]

PR_SET_PDEATHSIG = 1
_STOP_S = 15.0
_RESTARTS = 3
"""Of one service: what ends a fourth time does not get well by itself."""
_TAIL_BYTES: Final = 16384
"""The end of a log, of which its last lines are read."""


_prctl = ctypes.CDLL(None).prctl


def _end_with_parent() -> None:
    """Makes the child get SIGTERM when the loop's thread that started it ends, for any reason (Linux); called in the child."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _trainspan(arguments: Sequence[str], launcher: Sequence[str] = (sys.executable,)) -> list[str]:
    return [*launcher, "-m", "trainspan_cli", *arguments]


def _last_lines(log: Path, began: int = 0) -> list[str]:
    """The last lines of a log that are not empty, without those before its byte `began`; none if there is no log."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(began, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _tail(log: Path, lines: int = 2) -> str:
    """Two lines: a command's own last one often says only that its program ended, as of vLLM."""
    return " / ".join(_last_lines(log)[-lines:]) or "its log is empty"


class Service:
    """A long-lived `trainspan` command: stderr goes to `log`, events on stdout go to `events`, other lines to `log`, too.

    `launcher` runs its module, in one process or in several.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        launcher: Sequence[str] = (sys.executable,),
    ) -> None:
        self.name = name
        self.log = log
        self.events: queue.Queue[Event] = queue.Queue()
        self._arguments = list(arguments)
        self._environ = dict(environ)
        self._restarts_left = _RESTARTS
        self._launcher = launcher
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def restart_with(self, options: Sequence[str]) -> None:
        """Adds options for when it is started again."""
        self._arguments += options

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                _trainspan(self._arguments, self._launcher),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches only the loop, which then stops its children in order
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - it only makes a system call
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stdout: IO[str]) -> None:
        """Reads to the end, whatever the lines are: the process would wait forever to print the next one."""
        with self.log.open("ab", buffering=0) as log:
            for line in stdout:
                try:
                    event, trouble = parse(line), ""
                except InvalidRecordError as error:
                    event, trouble = None, f"{error}: "
                if event is not None:
                    self.events.put(event)
                    continue
                with contextlib.suppress(OSError):  # such as a full disk
                    log.write((trouble + line).encode(errors="replace"))

    def has_exited(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def keep_alive(self) -> bool:
        """Restarts the process if it exited; True if so. Raises ProcessError after too many restarts."""
        if self._process is None or not self.has_exited():
            return False
        if self._restarts_left <= 0:
            raise ProcessError(
                f"{self.name} exited with code {self._process.returncode}: {_tail(self.log)} (log: {self.log})"
            )
        self._restarts_left -= 1
        self.start()
        return True

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Polls `ready`. Raises ProcessError if the process exits first or the timeout expires."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._process is None or self._process.poll() is not None:
                code = self._process.returncode if self._process else None
                raise ProcessError(f"{self.name} exited with code {code}: {_tail(self.log)} (log: {self.log})")
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"{self.name} was not ready after {timeout_s:.0f} s: {_tail(self.log)} (log: {self.log})"
                )
            time.sleep(0.1)

    def stop(self, timeout_s: float = 30.0) -> None:
        """Sends SIGTERM, then SIGKILL after `timeout_s`."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Commands:
    """Runs `trainspan` commands that print JSON lines, also several at a time from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        on_event: Callable[[Event], None],
        write: Callable[[IO[str]], None] | None = None,
    ) -> tuple[int, str]:
        """Runs a command to its end and passes each of its events to `on_event`. `write` gets its standard input, in a thread.

        Returns the exit code and the last line of stderr. An interrupt stops the command too. Raises ProcessError if
        commands were stopped before this one could start.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        began = log.stat().st_size if log.exists() else 0
        with log.open("a") as stderr:
            process = self._start(arguments, environ, stderr, has_input=write is not None)
        assert process.stdout is not None
        if write is not None:
            threading.Thread(target=write, args=(process.stdin,), daemon=True).start()
        try:
            for line in process.stdout:
                if (event := parse(line)) is not None:
                    on_event(event)
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return code, next(reversed(_last_lines(log, began)), "")

    def stop(self) -> None:
        """Ends the commands in progress, and lets none start until `resume`."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _end(process)

    def resume(self) -> None:
        self._stopped = False

    def _start(
        self, arguments: Sequence[str], environ: Mapping[str, str], stderr: IO[str], *, has_input: bool
    ) -> "subprocess.Popen[str]":
        with self._lock:
            if self._stopped:
                raise ProcessError(f"{arguments[0]} was not started: the loop is stopping")
            process = subprocess.Popen(
                _trainspan(arguments),
                env=dict(environ),
                stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - it only makes a system call
            )
            self._running.add(process)
            return process


def _end(process: "subprocess.Popen[str]") -> None:
    """Sends SIGTERM, then SIGKILL."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
