"""Executes command agents: one process per rollout, under `opentelemetry-instrument`, in a prepared environment."""

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trainspan_rollouts.executors.agent_process import (
    AgentProcess,
    MemoryKills,
    cause_of,
    make_folder,
    read_reports,
    remove_folder,
    write_task,
)
from trainspan_rollouts.executors.executor import Ended, Execution
from trainspan_rollouts.executors.orphans import OrphanGuard
from trainspan_rollouts.task_file import Task
from trainspan_schemas.agents.invocation import Invoker
from trainspan_schemas.agents.worker import AgentReport
from trainspan_schemas.errors import InvalidRecordError, ProcessError, pip_install
from trainspan_schemas.store.collectors import ENV_COLLECTORS, Collectors
from trainspan_schemas.store.otlp_variables import ENDPOINT, own_variables, set_aside
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

__all__ = ["CommandExecutor", "agent_environment", "instrumented"]

TEMPORARY_FAILURE: Final = 75
"""Exit code `EX_TEMPFAIL` of sysexits.h: the agent asks for a retry."""
MAX_STRING_BYTES: Final = 32 * 4096
"""Linux's limit on one argument or environment variable, with its name and closing NUL (execve(2), MAX_ARG_STRLEN)."""

FOLDER_S: Final = 10.0
"""How long reading an agent's reports may take, and removing its folder."""

_KILLED: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Codes of a process that was killed, and of a shell whose command was."""
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
        raise ProcessError(f"{_INSTRUMENT} not found: {pip_install()} in the agent's environment")
    return [found, program, *command[1:]]


def agent_environment(
    environ: Mapping[str, str], policy_url: str, collectors: Sequence[str], otlp_headers: str = ""
) -> dict[str, str]:
    """Returns the environment shared by all agent processes, without the variables of a single rollout.

    The runner's own settings and credentials are removed: they name tasks, judge and tokens. `otlp_headers` are the
    agent's, as in OTEL_EXPORTER_OTLP_HEADERS: without any, those in `environ` may be the runner's. The OTLP variables of a backend
    that is none of the `collectors` are set aside for the agent. If `opentelemetry-instrument` is not on PATH, the folder of this Python
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
    own = own_variables(environ if otlp_headers else without_credentials(environ), collectors)
    kept = without_credentials(environ).items()
    chosen = {name: value for name, value in kept if name not in inherited and not _is_runners(name)}
    if shutil.which(_INSTRUMENT, path=chosen.get("PATH")) is None:
        chosen["PATH"] = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), chosen.get("PATH"))))
    chosen["OPENAI_BASE_URL"] = chosen["TRAINSPAN_POLICY_URL"] = policy_url
    set_aside(chosen, own)
    chosen[ENDPOINT] = collectors[0]
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
        self._memory = MemoryKills()
        self._reader = Invoker(_called, "trainspan-agent-folders")
        """In threads that keep no process alive: a file system of the agent's own may never answer."""
        self._removals: set[asyncio.Future[Any]] = set()
        self._command: list[str] = []

    async def start(self) -> None:
        """Finds the command. Raises ProcessError."""
        self._command = instrumented(self._arguments, self._environ)
        await asyncio.to_thread(self._guard.start)

    async def execute(self, execution: Execution) -> Ended:
        """Runs one process; then kills whatever it left running in its process group."""
        start_s = time.monotonic()
        try:
            folder = make_folder()
        except OSError as error:
            return _not_started("make a folder for the agent", error, start_s)
        try:
            ended = await self._run(execution, folder, start_s)
        except BaseException:
            self._remove(folder)
            raise
        await self._removed(folder)
        return ended

    async def _run(self, execution: Execution, folder: Path, start_s: float) -> Ended:
        kills = self._memory.count()
        task = json.dumps(execution.task.for_agent()).encode()
        try:
            task_file = await asyncio.to_thread(write_task, folder, task)
        except OSError as error:
            return _not_started("write the agent's task", error, start_s)
        try:
            command = [fill_in(word, execution.task, task_file) for word in self._command]
            environment = self._environment(execution, task, task_file, folder)
            process = await AgentProcess.start(command, environment, task + b"\n")
        except OSError as error:
            return _not_started(f"start {self._command[1]}", error, start_s)
        timed_out = False
        try:
            await asyncio.wait_for(process.wait(), execution.time_left(self._timeout_s))
        except TimeoutError:
            timed_out = True
            await process.end()
        except asyncio.CancelledError:
            await asyncio.shield(process.end())
            raise
        finally:
            await process.close()
        duration_s = time.monotonic() - start_s
        is_short_of_memory = not timed_out and process.code in _KILLED and self._memory.explain(kills)
        return await self._with_report(_ended(process, timed_out, is_short_of_memory, duration_s), folder)

    async def _with_report(self, ended: Ended, folder: Path) -> Ended:
        """With the report that the agent left; one that breaks the rules is the agent's error."""
        try:
            reading = asyncio.wrap_future(self._reader.start(read_reports, folder))
            return replace(ended, report=await asyncio.wait_for(reading, FOLDER_S))
        except InvalidRecordError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"its reports cannot be read within {FOLDER_S:g} s"
        if ended.status not in ("ok", "agent_error"):
            return ended
        text = f"{ended.error}; {reason}" if ended.error else reason
        return replace(ended, status="agent_error", error=text, asks_again=False)

    async def _removed(self, folder: Path) -> None:
        """Removes the folder; what takes too long goes on in the background."""
        await asyncio.wait([self._remove(folder)], timeout=FOLDER_S)

    def _remove(self, folder: Path) -> "asyncio.Future[Any]":
        removal = asyncio.wrap_future(self._reader.start(remove_folder, folder))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        return removal

    async def close(self) -> None:
        """Ends what agents left running elsewhere, and removes the rest of the folders; every `execute` has ended."""
        await asyncio.to_thread(self._guard.close)
        if self._removals:
            await asyncio.wait(self._removals, timeout=FOLDER_S)
        self._reader.close()

    def _environment(self, execution: Execution, task: bytes, task_file: Path, reports: Path) -> dict[str, str]:
        base = self._policy_url.rstrip("/").removesuffix("/v1")
        environment = {
            **self._environ,
            ENV_TRACEPARENT: str(execution.parent),
            ENV_BAGGAGE: execution.identity.to_baggage(),
            ENV_TASK_FILE: str(task_file),
            ENV_REPORT: str(reports),
            "OPENAI_BASE_URL": f"{base}{ROLLOUT_PATH_PREFIX}{execution.url_token}/v1",
            ENDPOINT: self._collectors.url_for(execution.identity.rollout_id),
        }
        if len(f"{ENV_TASK}=") + len(task) + 1 <= MAX_STRING_BYTES:
            environment[ENV_TASK] = task.decode()
        return environment


def _not_started(what: str, error: OSError, start_s: float) -> Ended:
    text = f"cannot {what}: {cause_of(error)}"
    if error.errno == errno.E2BIG:
        text += "; the task is too long for an argument: pass {task_file}, or read the task from stdin"
    return Ended("infra_error", time.monotonic() - start_s, error=text)


def _called(function: Callable[[Path], AgentReport | None], folder: Path) -> AgentReport | None:
    return function(folder)


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


def _ended(process: AgentProcess, timed_out: bool, is_short_of_memory: bool, duration_s: float) -> Ended:
    code, stdout = process.code, process.stdout_tail
    if timed_out:
        return Ended("timeout", duration_s, None, stdout, code, "timed out")
    if code == 0:
        return Ended("ok", duration_s, None, stdout, code)
    error = f"exit code {code}: {process.last_error_line}"
    if is_short_of_memory:  # it may have taken all of it itself
        error = f"killed for lack of memory: {error}"
    asks_again = is_short_of_memory or code == TEMPORARY_FAILURE
    return Ended("agent_error", duration_s, None, stdout, code, error, asks_again=asks_again)
