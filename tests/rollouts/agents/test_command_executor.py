"""The executor of commands by itself, where a test decides when its agents end or are cancelled."""

import asyncio
import errno
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainspan_rollouts.executors import command_executor
from trainspan_rollouts.executors.agent_process import AgentProcess, MemoryKills
from trainspan_rollouts.executors.command_executor import CommandExecutor
from trainspan_rollouts.executors.executor import AgentSpec, Ended, Execution
from trainspan_rollouts.executors.function_executor import WorkerPool
from trainspan_rollouts.task_file import Task
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry.identity import Identity, TraceParent

TIMEOUT_S = 20.0


def execution(word: str, timeout_s: float = TIMEOUT_S) -> Execution:
    """Of an agent whose `{input}` is `word`, and which has `timeout_s` left."""
    parent = TraceParent("a" * 32, "1" * 16)
    return Execution(Task(word, word), Identity(word), parent, "token", TIMEOUT_S - timeout_s)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where agents' folders are made."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def executor(tmp_path: Path, temporary: Path) -> Callable[[str], CommandExecutor]:
    """`executor(script)` runs `sh -c SCRIPT sh {input}`; here no agent needs instrumentation."""
    wrapper = tmp_path / "opentelemetry-instrument"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    def make(script: str) -> CommandExecutor:
        command = ["sh", "-c", script, "sh", "{input}"]
        collectors = Collectors.of("http://127.0.0.1:9")
        spec = AgentSpec(tuple(command), "http://127.0.0.1:9/v1", collectors, TIMEOUT_S, 1, None)
        return CommandExecutor(spec, environ)

    return make


def test_an_agent_that_timed_out_takes_no_other_agents_excuse_for_being_killed(
    tmp_path: Path, executor: Callable[[str], CommandExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 7\n")
    monkeypatch.setattr(command_executor, "MemoryKills", lambda: MemoryKills(vmstat))
    slow = f"trap 'echo oom_kill 8 > {vmstat}; exit 137' TERM; touch {tmp_path}/ready; sleep 60 & wait"
    killed = f"until test -e {tmp_path}/ended; do sleep 0.02; done; kill -9 $$"

    async def both() -> tuple[Ended, Ended]:
        agents = executor(f'case "$1" in slow) {slow};; killed) {killed};; esac')
        await agents.start()
        other = asyncio.create_task(agents.execute(execution("killed")))
        timed_out = await agents.execute(execution("slow", 1.0))
        (tmp_path / "ended").touch()
        ended = timed_out, await other
        await agents.close()
        return ended

    timed_out, other = asyncio.run(both())
    assert (tmp_path / "ready").exists()
    assert (timed_out.status, timed_out.exit_code) == ("timeout", 137)
    assert (other.status, other.asks_again, other.exit_code) == ("agent_error", True, -9)
    assert str(other.error).startswith("killed for lack of memory")


@pytest.mark.parametrize("stage", ["write_task", "AgentProcess.start", "wait", "read_reports", "remove_folder"])
def test_an_agent_that_is_cancelled_leaves_no_folder_at_whatever_stage_it_is(
    stage: str, temporary: Path, executor: Callable[[str], CommandExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = threading.Event()

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any) -> Any:
            reached.set()
            time.sleep(0.3)
            return function(*args)

        return wait

    async def start(*_: Any) -> AgentProcess:
        reached.set()
        await asyncio.sleep(60)
        raise AssertionError

    if stage == "AgentProcess.start":
        monkeypatch.setattr(AgentProcess, "start", start)
    elif stage != "wait":
        monkeypatch.setattr(command_executor, stage, slow(getattr(command_executor, stage)))

    async def main() -> None:
        agents = executor("sleep 60" if stage == "wait" else "exit 0")
        await agents.start()
        task = asyncio.create_task(agents.execute(execution("x")))
        if stage == "wait":
            await asyncio.sleep(0.3)
        else:
            assert await asyncio.to_thread(reached.wait, 10)
        assert len([*temporary.iterdir()]) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await agents.close()

    asyncio.run(main())
    assert [*temporary.iterdir()] == []


def _full(*_: Any) -> Path:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x/task.json")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("folder", r"cannot make a folder for the agent: No such file or directory: \S+/temporary/trainspan-\w+"),
        ("disk", "cannot write the agent's task: No space left on device: /tmp/x/task.json"),
        ("program", r"cannot start \S+/sh: No such file or directory: \S+/opentelemetry-instrument"),
    ],
)
def test_an_agent_that_is_not_started_names_what_failed_and_where(
    what: str, error: str, tmp_path: Path, temporary: Path, executor: Callable[[str], CommandExecutor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    async def main() -> Ended:
        agents = executor("exit 0")
        await agents.start()
        match what:
            case "folder":
                shutil.rmtree(temporary)
            case "disk":
                monkeypatch.setattr(command_executor, "write_task", _full)
            case "program":
                (tmp_path / "opentelemetry-instrument").unlink()
        ended = await agents.execute(execution("x"))
        await agents.close()
        return ended

    ended = asyncio.run(main())
    assert ended.status == "infra_error"
    assert re.fullmatch(error, str(ended.error)), ended.error


def test_a_worker_that_cannot_be_started_costs_its_own_rollout_only_and_names_the_cause(tmp_path: Path) -> None:
    python, wrapper, agent = (tmp_path / name for name in ("python", "opentelemetry-instrument", "agent.py"))
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.write_text(good := '#!/bin/sh\nexec "$@"\n')
    for file in (python, wrapper):
        file.chmod(0o755)
    agent.write_text("import os\ndef solve(task): return task['input'] if task['input'] == 'lives' else os._exit(7)")

    async def main() -> tuple[Ended, Ended, Ended]:
        pool = WorkerPool(f"{agent}:solve", 1, TIMEOUT_S, {"PATH": "/usr/bin:/bin"}, str(python))
        await pool.start()
        dies = await pool.execute(execution("dies"))
        wrapper.write_text("#!/no/such/python\n")
        not_started = await pool.execute(execution("lives"))
        wrapper.write_text(good)
        lives = await pool.execute(execution("lives"))
        await pool.close()
        return dies, not_started, lives

    dies, not_started, lives = asyncio.run(main())
    assert (dies.status, dies.exit_code) == ("agent_error", 7)
    assert (not_started.status, not_started.error) == (
        "infra_error",
        f"cannot start a worker for {agent}:solve: No such file or directory: {wrapper} (its interpreter is missing)",
    )
    assert (lives.status, lives.value) == ("ok", "lives")
