"""Executes command agents: one process per rollout, under `opentelemetry-instrument`, in a prepared environment.

A coding harness is a command too; it is not instrumented, and has a home and a work folder of its own.
"""

import asyncio
import errno
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from trainspan_rollouts.executors.agent_process import (
    AgentProcess,
    MemoryKills,
    cause_of,
    make_folder,
    read_reports,
    remove_folder,
    write_task,
)
from trainspan_rollouts.executors.executor import AgentSpec, Ended, Execution
from trainspan_rollouts.executors.orphans import OrphanGuard
from trainspan_rollouts.harnesses.harness import Harness, Prepared
from trainspan_rollouts.harnesses.placeholders import fill_in, names_in, task_values
from trainspan_rollouts.harnesses.preflight import ServedModel, served_model
from trainspan_schemas.agents.invocation import Invoker
from trainspan_schemas.agents.worker import AgentReport
from trainspan_schemas.errors import InvalidRecordError, ProcessError, pip_install
from trainspan_schemas.store.collectors import ENV_COLLECTORS
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
from trainspan_schemas.telemetry.keys import ATTEMPT, ROLLOUT_ID, ROLLOUT_PATH_PREFIX

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
_OF_MODEL: Final = ("model", "max_model_len", "max_output_tokens")
"""The placeholders that only the policy server can tell."""
_PRIVATE: Final = frozenset({"TRAINSPAN_HOME", "TRAINSPAN_SERVER_PLAN", "TRAINSPAN_SERVER_LINK"})


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
    on_path = shutil.which(_INSTRUMENT, path=environ.get("PATH"))
    if on_path is None:
        raise ProcessError(f"{_INSTRUMENT} not found: {pip_install()} in the agent's environment")
    return [on_path, program, *command[1:]]


def agent_environment(
    environ: Mapping[str, str],
    policy_url: str,
    collectors: Sequence[str],
    otlp_headers: str = "",
    *,
    is_instrumented: bool = True,
) -> dict[str, str]:
    """Returns the environment shared by all agent processes, without the variables of a single rollout.

    The runner's own settings and credentials are removed: they name tasks, judge and tokens. `otlp_headers` are the
    agent's, as in OTEL_EXPORTER_OTLP_HEADERS: without any, those in `environ` may be the runner's. The OTLP variables of a backend
    that is none of the `collectors` are set aside for the agent. If an agent `is_instrumented` and `opentelemetry-instrument` is not on
    PATH, the folder of this Python is put first there: `python` is then the one with trainspan, as if its environment were activated.
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
    program_variables = own_variables(environ if otlp_headers else without_credentials(environ), collectors)
    inheritable = without_credentials(environ).items()
    chosen = {name: value for name, value in inheritable if name not in inherited and not _is_runners(name)}
    if is_instrumented and shutil.which(_INSTRUMENT, path=chosen.get("PATH")) is None:
        chosen["PATH"] = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), chosen.get("PATH"))))
    chosen["TRAINSPAN_POLICY_URL"] = policy_url
    chosen |= _base_urls(policy_url.rstrip("/").removesuffix("/v1"))
    set_aside(chosen, program_variables)
    chosen[ENDPOINT] = collectors[0]
    chosen.setdefault("OPENAI_API_KEY", "trainspan")
    chosen.setdefault("ANTHROPIC_AUTH_TOKEN", chosen["OPENAI_API_KEY"])
    chosen["OTEL_EXPORTER_OTLP_HEADERS"] = otlp_headers
    return chosen


def _base_urls(root: str) -> dict[str, str]:
    """The variables by which clients find the policy. Anthropic's add /v1 themselves."""
    return {"OPENAI_BASE_URL": f"{root}/v1", "OPENAI_API_BASE": f"{root}/v1", "ANTHROPIC_BASE_URL": root}


def _is_runners(name: str) -> bool:
    """Whether a variable is a setting of trainspan's own processes, or the path of their secrets."""
    return name.startswith("TRAINSPAN_") and ("__" in name or name in _PRIVATE)


class CommandExecutor:
    """Starts the command of `spec`, or a harness, for each rollout; arguments may have placeholders (connection.py).

    The task is passed as JSON on stdin if `spec` says so, in a file, and in an environment variable if it fits.
    """

    def __init__(self, spec: AgentSpec, environ: Mapping[str, str], harness: Harness | None = None) -> None:
        self._spec = spec
        self._harness = harness
        self._guard = OrphanGuard()
        self._environ = {**environ, **self._guard.mark}
        self._memory = MemoryKills()
        self._reader = Invoker(_called, "trainspan-agent-folders")
        """In threads that keep no process alive: a file system of the agent's own may never answer."""
        self._removals: set[asyncio.Future[Any]] = set()
        self._unreleased: dict[tuple[str, int], Path] = {}
        """Rollout id and attempt → a harness's folder, which its judge may need."""
        self._command: list[str] = []
        self._model: ServedModel | None = None

    async def start(self) -> None:
        """Finds the command and asks for the served model. Raises ProcessError or UsageError."""
        url = self._spec.policy_url
        self._model = await asyncio.to_thread(served_model, url, self._environ.get("OPENAI_API_KEY", ""))
        if self._harness is not None:
            await asyncio.to_thread(self._harness.start, self._environ, self._model, url)
        else:
            self._command = instrumented(self._spec.target, self._environ)
            placeholders = [name for word in self._command for name in names_in(word) if name in _OF_MODEL]
            if placeholders and placeholders[0] not in self._of_model():
                raise ProcessError(
                    f"{{{placeholders[0]}}}: the policy server at {url} does not tell; start `trainspan serve`"
                )
        if self._model is not None:
            self._environ.setdefault("OPENAI_MODEL", self._model.name)
        await asyncio.to_thread(self._guard.start)

    async def execute(self, execution: Execution) -> Ended:
        """Runs one process; then kills whatever it left running in its process group."""
        start_s = time.monotonic()
        try:
            folder = self._make_folder(execution)
        except OSError as error:
            return _not_started("make a folder for the agent", error, start_s)
        if self._harness is not None:
            self._unreleased[_key(execution)] = folder
            return await self._run(execution, folder, start_s)
        try:
            ended = await self._run(execution, folder, start_s)
        except BaseException:
            self._remove(folder)
            raise
        await self._removed(folder)
        return ended

    async def release(self, execution: Execution) -> None:
        """Removes home and work folder of a harness, unless they are to stay."""
        folder = self._unreleased.pop(_key(execution), None)
        if folder is not None and self._spec.keep_workspaces is None:
            await self._removed(folder)

    def _make_folder(self, execution: Execution) -> Path:
        if self._harness is None or self._spec.keep_workspaces is None:
            return make_folder()
        folder = Path(self._spec.keep_workspaces) / "-".join(map(str, _key(execution)))
        folder.mkdir(parents=True, mode=0o700)
        return folder

    async def _run(self, execution: Execution, folder: Path, start_s: float) -> Ended:
        kills = self._memory.count()
        task = json.dumps(execution.task.for_agent()).encode()
        try:
            task_file = await asyncio.to_thread(write_task, folder, task)
        except OSError as error:
            return _not_started("write the agent's task", error, start_s)
        try:
            prepared = await asyncio.to_thread(self._prepared, execution, task, task_file, folder)
        except ProcessError as error:
            return Ended("infra_error", time.monotonic() - start_s, error=str(error))
        except OSError as error:
            return _not_started("make the agent's workspace", error, start_s)
        except ValueError as error:
            return _not_passed("a path or file", error, start_s)
        try:
            stdin = task + b"\n" if self._spec.stdin == "task" else None
            workdir = prepared.workdir if self._harness else None
            process = await AgentProcess.start(prepared.command, prepared.environment, stdin, workdir)
        except OSError as error:
            return _not_started(f"start {prepared.command[0 if self._harness else 1]}", error, start_s)
        except ValueError as error:
            return _not_passed("an argument or variable", error, start_s)
        timed_out = False
        try:
            await asyncio.wait_for(process.wait(), execution.time_left(self._spec.timeout_s))
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
        ended = _ended(process, timed_out, is_short_of_memory, duration_s)
        return await self._with_report(replace(ended, workdir=workdir), folder)

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
        if self._spec.keep_workspaces is None:
            for folder in self._unreleased.values():
                self._remove(folder)
        if self._removals:
            await asyncio.wait(self._removals, timeout=FOLDER_S)
        self._reader.close()
        if self._harness is not None:
            await asyncio.to_thread(self._harness.close)

    def _prepared(self, execution: Execution, task: bytes, task_file: Path, folder: Path) -> Prepared:
        environment = self._environment(execution, task, task_file, folder)
        values = {**task_values(execution.task, task_file), **self._places(execution, environment)}
        if self._harness is not None:
            return self._harness.prepare(folder, values, environment)
        return Prepared([fill_in(word, values) for word in self._command], environment, folder)

    def _environment(self, execution: Execution, task: bytes, task_file: Path, reports: Path) -> dict[str, str]:
        base = self._spec.policy_url.rstrip("/").removesuffix("/v1")
        environment = {
            **self._environ,
            ENV_TRACEPARENT: str(execution.parent),
            ENV_BAGGAGE: execution.identity.to_baggage(),
            ENV_TASK_FILE: str(task_file),
            ENV_REPORT: str(reports),
            **_base_urls(f"{base}{ROLLOUT_PATH_PREFIX}{execution.url_token}"),
            ENDPOINT: self._spec.collectors.url_for(execution.identity.rollout_id),
        }
        if len(f"{ENV_TASK}=") + len(task) + 1 <= MAX_STRING_BYTES:
            environment[ENV_TASK] = task.decode()
        return environment

    def _places(self, execution: Execution, environment: Mapping[str, str]) -> dict[str, object]:
        """The placeholders that a rollout has besides its task and its folders."""
        collector, identity = environment["OTEL_EXPORTER_OTLP_ENDPOINT"], execution.identity
        return {
            "base_url": environment["OPENAI_BASE_URL"],
            "anthropic_base_url": environment["ANTHROPIC_BASE_URL"],
            "api_key": environment.get("OPENAI_API_KEY", "trainspan"),
            "otlp_grpc": collector,
            "otlp_http": self._spec.otlp_http.get(collector, collector),
            "otlp_headers": environment.get("OTEL_EXPORTER_OTLP_HEADERS", ""),
            "otlp_resource": f"{ROLLOUT_ID}={quote(identity.rollout_id)},{ATTEMPT}={identity.attempt}",
            **self._of_model(),
        }

    def _of_model(self) -> dict[str, object]:
        model = self._model
        if model is None:
            return {}
        length = model.max_model_len
        sizes = {} if length is None else {"max_model_len": length, "max_output_tokens": length // 4}
        return {"model": model.name, **sizes}


def _key(execution: Execution) -> tuple[str, int]:
    return execution.identity.rollout_id, execution.identity.attempt


def _not_started(what: str, error: OSError, start_s: float) -> Ended:
    text = f"cannot {what}: {cause_of(error)}"
    if error.errno == errno.E2BIG:
        text += "; the task is too long for an argument: pass {task_file}, or read the task from stdin"
    return Ended("infra_error", time.monotonic() - start_s, error=text)


def _not_passed(what: str, error: ValueError, start_s: float) -> Ended:
    """Of a task with a NUL."""
    text = f"{what} cannot have the task's text: {error}; pass {{task_file}}, or read the task from stdin"
    return Ended("infra_error", time.monotonic() - start_s, error=text)


def _called(function: Callable[[Path], AgentReport | None], folder: Path) -> AgentReport | None:
    return function(folder)


def _ended(process: AgentProcess, timed_out: bool, is_short_of_memory: bool, duration_s: float) -> Ended:
    code, stdout = process.code, process.stdout_tail
    if timed_out:
        words = process.last_words
        return Ended("timeout", duration_s, None, stdout, code, f"timed out: {words}" if words else "timed out")
    if code == 0:
        return Ended("ok", duration_s, None, stdout, code)
    error = f"exit code {code}: {process.last_words}"
    if is_short_of_memory:  # it may have taken all of it itself
        error = f"killed for lack of memory: {error}"
    asks_again = is_short_of_memory or code == TEMPORARY_FAILURE
    return Ended("agent_error", duration_s, None, stdout, code, error, asks_again=asks_again)
