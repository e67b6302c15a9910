"""The executor of commands by itself, where a test decides when its agents end or are cancelled."""

import asyncio
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
from trainspan_rollouts.executors.executor import Ended, Execution
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
        return CommandExecutor(
            command, "http://127.0.0.1:9/v1", Collectors.of("http://127.0.0.1:9"), TIMEOUT_S, environ
        )

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
