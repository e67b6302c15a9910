"""Executes command agents: one process per rollout, under `opentelemetry-instrument`, in a prepared environment."""

import asyncio
import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trainspan_rollouts.executors.executor import Ended, Execution
from trainspan_rollouts.executors.orphans import GRACE_S, OrphanGuard
from trainspan_rollouts.task_file import Task
from trainspan_schemas.agents.worker import AgentReport
from trainspan_schemas.errors import ProcessError
from trainspan_schemas.store.collectors import ENV_COLLECTORS, Collectors
from trainspan_schemas.store.senders import without_credentials
from trainspan_schemas.telemetry.identity import (
    ENV_BAGGAGE,
    ENV_REPORT,
    ENV_TASK,
    ENV_TASK_FILE,
    ENV_TRACEPARENT,
    ENV_TRACESTATE,
)
from trainspan_schemas.telemetry.keys import ROLLOUT_PATH_PREFIX
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["CommandExecutor", "agent_environment", "instrumented"]

TAIL_BYTES: Final = 64 * 1024
TEMPORARY_FAILURE: Final = 75
"""Exit code `EX_TEMPFAIL` of sysexits.h: the agent asks for a retry."""
MAX_STRING_BYTES: Final = 32 * 4096
"""Linux's limit on one argument or environment variable, with its name and closing NUL (execve(2), MAX_ARG_STRLEN)."""

_INSTRUMENT: Final = "opentelemetry-instrument"
_PRIVATE: Final = frozenset({"TRAINSPAN_HOME", "TRAINSPAN_SERVER_PLAN", "TRAINSPAN_SERVER_LINK"})
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")


def instrumented(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the command under `opentelemetry-instrument`: the one next to the command, otherwise the first on PATH.

    Raises ProcessError if either is missing.
    """
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        raise ProcessError(f"command not found: {command[0]!r} is not an executable file or on PATH")
    wrapper = Path(program).parent / _INSTRUMENT
    if wrapper.is_file() and os.access(wrapper, os.X_OK):
        return [str(wrapper), program, *command[1:]]
    found = shutil.which(_INSTRUMENT, path=environ.get("PATH"))
    if found is None:
        raise ProcessError(f"{_INSTRUMENT} not found: pip install trainspan in the agent's environment")
    return [found, program, *command[1:]]


def agent_environment(
    environ: Mapping[str, str], policy_url: str, collector: str, otlp_headers: str = ""
) -> dict[str, str]:
    """Returns the environment shared by all agent processes, without the variables of a single rollout.

    The runner's own settings and credentials are removed: they name tasks, judge and tokens. `otlp_headers` are the
    agent's, as in OTEL_EXPORTER_OTLP_HEADERS. If `opentelemetry-instrument` is not on PATH, the folder of this Python
    is put first there: `python` is then the one with trainspan, as if its environment were activated.
    """
    inherited = {
        ENV_TRACEPARENT,
        ENV_TRACESTATE,
        ENV_BAGGAGE,
        ENV_TASK,
        ENV_TASK_FILE,
        ENV_REPORT,
        ENV_COLLECTORS,
        "TRAINSPAN_BOUNDARY",
    }
    kept = without_credentials(environ).items()
    chosen = {name: value for name, value in kept if name not in inherited and not _is_runners(name)}
    if shutil.which(_INSTRUMENT, path=chosen.get("PATH")) is None:
        chosen["PATH"] = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), chosen.get("PATH"))))
    chosen["OPENAI_BASE_URL"] = chosen["TRAINSPAN_POLICY_URL"] = policy_url
    chosen["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector
    chosen.setdefault("OPENAI_API_KEY", "trainspan")
    chosen["OTEL_EXPORTER_OTLP_HEADERS"] = otlp_headers
    return chosen


def _is_runners(name: str) -> bool:
    """Whether a variable is a setting of trainspan's own processes, or the path of their secrets."""
    return name.startswith("TRAINSPAN_") and ("__" in name or name in _PRIVATE)


class CommandExecutor:
    """Starts `command` for each rollout. Arguments may contain `{id}`, `{input}`, `{task_file}` and fields of the input.

    The task is passed as JSON on stdin, in a file, and in an environment variable if it fits.
    """

    def __init__(
        self,
        command: Sequence[str],
        policy_url: str,
        collectors: Collectors,
        timeout_s: float,
        environ: Mapping[str, str],
    ) -> None:
        self._arguments = list(command)
        self._policy_url = policy_url
        self._collectors = collectors
        self._timeout_s = timeout_s
        self._guard = OrphanGuard()
        self._environ = {**environ, **self._guard.mark}
        self._folder = tempfile.TemporaryDirectory(prefix="trainspan-")
        self._command: list[str] = []

    async def start(self) -> None:
        """Finds the command. Raises ProcessError."""
        self._command = instrumented(self._arguments, self._environ)
        await asyncio.to_thread(self._guard.start)

    async def execute(self, execution: Execution) -> Ended:
        """Runs one process; then kills whatever it left running in its process group."""
        start_s = time.monotonic()
        folder = Path(self._folder.name, secrets.token_hex(8))
        task = json.dumps(execution.task.for_agent()).encode()
        try:
            folder.mkdir(mode=0o700)
            process = await self._start(execution, task, folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            return Ended("infra_error", time.monotonic() - start_s, error=self._why_not_started(error))
        streams = _Streams(process, task + b"\n")
        timed_out = False
        try:
            await asyncio.wait_for(process.wait(), execution.time_left(self._timeout_s))
        except TimeoutError:
            timed_out = True
            await _end_group(process)
        except asyncio.CancelledError:
            await asyncio.shield(_end_group(process))
            raise
        finally:
            _signal_group(process, signal.SIGKILL)
            await streams.close()
        duration_s = time.monotonic() - start_s
        return _ended(process.returncode, timed_out, duration_s, streams, _read_reports(folder))

    async def close(self) -> None:
        """Removes the folders; every process has already ended with its `execute`."""
        await asyncio.to_thread(self._guard.close)
        self._folder.cleanup()

    async def _start(self, execution: Execution, task: bytes, folder: Path) -> asyncio.subprocess.Process:
        """Writes the task file into `folder` and starts the process. Raises OSError."""
        task_file = folder / "task" / "task.json"
        await asyncio.to_thread(_write_task, task_file, task)
        return await asyncio.create_subprocess_exec(
            *(fill_in(word, execution.task, task_file) for word in self._command),
            env=self._environment(execution, task, task_file, folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    def _why_not_started(self, error: OSError) -> str:
        text = f"cannot start {self._command[1]}: {error}"
        if error.errno == errno.E2BIG:
            text += "; the task is too long for an argument: pass {task_file}, or read the task from stdin"
        return text

    def _environment(self, execution: Execution, task: bytes, task_file: Path, reports: Path) -> dict[str, str]:
        base = self._policy_url.rstrip("/").removesuffix("/v1")
        environment = {
            **self._environ,
            ENV_TRACEPARENT: str(execution.parent),
            ENV_BAGGAGE: execution.identity.to_baggage(),
            ENV_TASK_FILE: str(task_file),
            ENV_REPORT: str(reports),
            "OPENAI_BASE_URL": f"{base}{ROLLOUT_PATH_PREFIX}{execution.url_token}/v1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self._collectors.url_for(execution.identity.rollout_id),
        }
        if len(f"{ENV_TASK}=") + len(task) + 1 <= MAX_STRING_BYTES:
            environment[ENV_TASK] = task.decode()
        return environment


def _write_task(file: Path, task: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(task)


def fill_in(word: str, task: Task, task_file: Path) -> str:
    """Replaces `{id}`, `{input}`, `{task_file}` and fields of an object input in an argument; keeps other braces."""
    own = task.input if isinstance(task.input, dict) else {}
    fields = {"task_file": str(task_file), **own, "id": task.id, "input": task.input}

    def replace(match: re.Match[str]) -> str:
        if match[1] not in fields:
            return match[0]
        value = fields[match[1]]
        return value if isinstance(value, str) else json.dumps(value)

    return _PLACEHOLDER.sub(replace, word)


class _Streams:
    """Writes the task to a process and keeps the tail of its output."""

    def __init__(self, process: asyncio.subprocess.Process, task: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._tasks = (
            asyncio.create_task(_feed(process.stdin, task)),
            asyncio.create_task(_keep_tail(process.stdout, self.stdout)),
            asyncio.create_task(_keep_tail(process.stderr, self.stderr)),
        )

    async def close(self) -> None:
        """Reads the remaining output; does not wait for a stray process that holds the pipes open."""
        _, pending = await asyncio.wait(self._tasks, timeout=1.0)
        for task in pending:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _feed(stdin: asyncio.StreamWriter, task: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an agent need not read its task here
        stdin.write(task)
        await stdin.drain()
        stdin.close()


async def _keep_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while chunk := await stream.read(TAIL_BYTES):
        tail += chunk
        del tail[:-TAIL_BYTES]


async def _end_group(process: asyncio.subprocess.Process) -> None:
    _signal_group(process, signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        _signal_group(process, signal.SIGKILL)
        await process.wait()


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _read_reports(folder: Path) -> AgentReport | None:
    reports = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            reports.append(AgentReport(**json.loads(path.read_text())))
    shutil.rmtree(folder, ignore_errors=True)
    if not reports:
        return None
    return AgentReport(
        sum(report.calls for report in reports),
        any(report.policy_failing for report in reports),
        [reward for report in reports for reward in report.rewards],
    )


def _ended(
    code: int | None, timed_out: bool, duration_s: float, streams: _Streams, report: AgentReport | None
) -> Ended:
    stdout = streams.stdout.decode(errors="replace")
    last = (streams.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    if timed_out:
        return Ended("timeout", duration_s, None, stdout, code, "timed out", report)
    if code == 0:
        return Ended("ok", duration_s, None, stdout, code, None, report)
    failing = report is not None and report.policy_failing
    killed = code == -signal.SIGKILL  # not by us: out of memory, most likely
    status: RolloutStatus = "infra_error" if failing or killed or code == TEMPORARY_FAILURE else "agent_error"
    return Ended(status, duration_s, None, stdout, code, f"exit code {code}: {last}", report)
