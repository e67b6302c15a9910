"""Keeps the server process up: starts it, restarts it with the last good policy after a crash, stops it on a signal."""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainspan_schemas.errors import ProcessError
from trainspan_serving.process.link import LINK_VARIABLE, LinkEvent
from trainspan_serving.process.server_plan import PLAN_VARIABLE, ServerPlan

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)

_MAX_RESTARTS = 5
_RESTART_WINDOW_S = 600.0
_STOP_S = 20.0
_POLL_S = 0.2


class Supervisor:
    """Runs one server at a time; at most 5 restarts within 10 minutes."""

    def __init__(
        self,
        plan: ServerPlan,
        host: str,
        port: int,
        flags: Sequence[str],
        environment: Mapping[str, str],
        on_ready: Callable[[str, int], None],
    ) -> None:
        self._first = self._good = plan
        self._host, self._port = host, port
        self._flags, self._environment = flags, environment
        self._on_ready = on_ready
        self._crashes: deque[float] = deque()
        self._stop_signal: int | None = None
        self._was_ready = False

    def run(self) -> int:
        """Runs until a signal; returns 0. Raises ProcessError if the server never came up or crashed too often."""
        earlier = {number: signal.signal(number, self._note_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self._stop_signal is None:
                code = self._run_once()
                if self._stop_signal is None:
                    self._after_crash(code)
            return 0
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, frame: object) -> None:
        self._stop_signal = number

    def _run_once(self) -> int:
        """Runs one server process until it ends; returns its exit code."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = self._start(theirs)
            try:
                self._follow(process, ours)
            finally:
                self._stop(process)
        return process.returncode

    def _start(self, link: socket.socket) -> "subprocess.Popen[bytes]":
        environment = {**self._environment, PLAN_VARIABLE: self._good.to_json(), LINK_VARIABLE: str(link.fileno())}
        command = [sys.executable, "-m", "trainspan_serving.process.server", "--model", self._good.model, *self._flags]
        # A new session: Ctrl-C reaches only this process, which then stops the server cleanly.
        # vLLM logs to stdout, which we reserve for results: redirect it to stderr.
        return subprocess.Popen(command, env=environment, stdout=2, pass_fds=[link.fileno()], start_new_session=True)

    def _follow(self, process: "subprocess.Popen[bytes]", link: socket.socket) -> None:
        """Handles the server's events until it ends or a signal arrives."""
        buffer = b""
        while self._stop_signal is None and process.poll() is None:
            if not select.select([link], [], [], _POLL_S)[0]:
                continue
            data = link.recv(65_536)
            if not data:
                process.wait(_STOP_S)
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, event: LinkEvent) -> None:
        if event["event"] == "ready":
            self._was_ready = True
            is_tls = any(flag.partition("=")[0] == "--ssl-certfile" for flag in self._flags)
            self._on_ready(f"http{'s' if is_tls else ''}://{self._host}:{self._port}/v1", self._good.version)
        else:
            self._good = self._good.serving(event["policy"], event["model"], event["adapter"], event["version"])

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        """Sends SIGTERM, then SIGKILL to the server and its child processes."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                _log.warning("server did not stop pid=%d: killing it", process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _after_crash(self, code: int) -> None:
        """Prepares the restart, or raises ProcessError."""
        if not self._was_ready:
            raise ProcessError(f"vLLM exited with code {code} before it was ready; see its messages above")
        now = time.monotonic()
        self._crashes.append(now)
        while now - self._crashes[0] > _RESTART_WINDOW_S:
            self._crashes.popleft()
        if len(self._crashes) > _MAX_RESTARTS:
            raise ProcessError(f"vLLM crashed {len(self._crashes)} times within {_RESTART_WINDOW_S:g} s; giving up")
        self._leave_gone_checkpoints()
        _log.error("server crashed code=%d: restarting version=%d", code, self._good.version)

    def _leave_gone_checkpoints(self) -> None:
        """Goes back to the first weights, or a policy's first adapter, if those in service are no longer on disk."""
        first = self._first
        folders = [self._good.adapter, self._good.model if self._good.model != first.model else None]
        gone = [folder for folder in folders if _is_gone(folder)]
        if gone and self._good != first:
            _log.error("checkpoint gone folder=%s: restarting with %s", gone[0], first.model)
            self._good = replace(first, policies=self._good.policies)
        for name, policy in self._good.policies.items():
            if not _is_gone(policy.adapter):
                continue
            adapter, version = first.policies[name].adapter, first.policies[name].version
            if _is_gone(adapter):
                adapter, version = None, first.version
            _log.error("checkpoint gone policy=%s folder=%s: restarting with version=%d", name, policy.adapter, version)
            self._good = self._good.serving(name, self._good.model, adapter, version)


def _is_gone(folder: str | None) -> bool:
    return folder is not None and not Path(folder).is_dir()
