"""Agents that kill themselves or their worker, take all memory, or write to the worker's channel."""

import json
import time
from pathlib import Path

import pytest

from tests.rollouts.agents.test_commands import is_running
from tests.rollouts.agents.test_functions import statuses, tasks
from tests.rollouts.agents.test_hostile_agents import GOOD
from tests.rollouts.conftest import Run
from tests.support.otlp.recorder import OtlpRecorder
from trainspan import _worker
from trainspan_rollouts.executors import command_executor, function_executor
from trainspan_rollouts.executors.agent_process import MemoryKills
from trainspan_schemas.agents.worker import AgentReport, JobOutcome, decode
from trainspan_schemas.errors import InvalidRecordError


@pytest.mark.ci
def test_an_agent_that_asks_for_another_attempt_or_kills_itself_failed_in_the_end(
    run: Run, recorder: OtlpRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
    import json, os, pathlib, signal, sys

    case = sys.argv[1]
    if case == "claim":
        claim = {"calls": 0, "policy_failing": True, "rewards": []}
        pathlib.Path(os.environ["TRAINSPAN_REPORT"], "9.json").write_text(json.dumps(claim))
        sys.exit(1)
    if case == "again":
        sys.exit(75)
    if case == "memory":  # as one that takes all of it until the kernel kills it
        kills = int(pathlib.Path("vmstat").read_text().split()[-1])
        pathlib.Path("vmstat").write_text(f"oom_kill {kills + 1}")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 1\noom_kill 7\n")
    monkeypatch.setattr(command_executor, "MemoryKills", lambda: MemoryKills(vmstat))
    result = run(source, tasks("claim", "again", "killed", "memory"), "python", "agent.py", "{input}", concurrency=1)
    assert result.status == {"agent_error": 4}
    assert statuses(recorder) == {
        ("claim", 0): "infra_error",  # tried again because it asked for that
        ("claim", 1): "agent_error",
        ("again", 0): "infra_error",
        ("again", 1): "agent_error",
        ("killed", 0): "agent_error",
        ("memory", 0): "infra_error",
        ("memory", 1): "agent_error",
    }


@pytest.mark.ci
@pytest.mark.parametrize(
    ("others", "attempts"),
    [
        pytest.param(["neighbor"], {("neighbor", 0): "infra_error", ("neighbor", 1): "ok"}, id="in the same worker"),
        pytest.param(["later"], {("later", 0): "infra_error", ("later", 1): "ok"}, id="whose worker is killed too"),
    ],
)
def test_a_function_that_takes_all_memory_failed_in_the_end_and_costs_others_one_attempt(
    run: Run,
    recorder: OtlpRecorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    others: list[str],
    attempts: dict[tuple[str, int], str],
) -> None:
    """Nobody knows whose kill it was, if it shared its worker. `later` comes while memory is still short: its worker is killed as it
    begins."""
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 7\n")
    source = """
    import asyncio, os, pathlib, signal

    short, vmstat = pathlib.Path("short").resolve(), pathlib.Path("vmstat").resolve()

    def kill():
        kills = int(vmstat.read_text().split()[-1])
        vmstat.write_text(f"oom_kill {kills + 1}")
        os.kill(os.getpid(), signal.SIGKILL)

    if short.exists():
        short.unlink()
        kill()

    async def solve(task):
        tried = pathlib.Path(task["id"]).resolve()
        is_first = not tried.exists()
        tried.touch()
        if task["input"] == "memory":
            await asyncio.sleep(.5)
            if not is_first:
                short.touch()
            kill()
        if task["input"] == "neighbor" and is_first:
            await asyncio.sleep(30)
        return 1
    """
    monkeypatch.setattr(function_executor, "MemoryKills", lambda: MemoryKills(vmstat))
    width = 2 if others == ["neighbor"] else 1
    result = run(source, tasks("memory", *others), "agent:solve", workers=1, concurrency=width, retries=1)
    assert statuses(recorder) == {("memory", 0): "infra_error", ("memory", 1): "agent_error", **attempts}
    assert result.status == {"agent_error": 1, "ok": 1}
    assert "the worker died with code -9, for lack of memory; it is tried again" in caplog.text
    assert "error='the worker died with code -9, for lack of memory'" in caplog.text
    assert ("cannot start a worker again: " in caplog.text) == (others == ["later"])


def test_each_kill_for_lack_of_memory_explains_the_end_of_one_agent(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    kills = MemoryKills(vmstat)
    assert (kills.count(), kills.explain(0)) == (0, False)  # not counted here
    vmstat.write_text("oom_kill 7\n")
    assert (kills.count(), kills.explain(7)) == (7, False)
    vmstat.write_text("oom_kill 8\n")
    assert [kills.explain(7), kills.explain(7)] == [True, False]
    vmstat.write_text("oom_kill 10\n")  # one of them before the second agent began
    assert [kills.explain(9), kills.explain(9), kills.explain(7)] == [True, False, False]


@pytest.mark.ci
def test_an_agent_that_writes_to_its_workers_channel_or_cancels_itself_failed(
    run: Run, recorder: OtlpRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
    import asyncio, os, sys, time

    async def solve(task):
        if task["input"] == "cancel":
            raise asyncio.CancelledError
        if task["input"] != "good":
            channel = int(sys.argv[sys.argv.index("--fd") + 1])
            os.write(channel, (b"[" * 1000 if task["input"] == "deep" else b"{}") + bytes([10]))
            time.sleep(60)
    """
    result = run(source, tasks("deep", "kind", "cancel", "good"), "agent:solve", concurrency=1)
    assert result.status == {"agent_error": 3, "ok": 1}
    assert (
        caplog.text.count("the worker died with code -15 after it wrote InvalidRecordError: not a worker message") == 2
    )
    assert "error='the agent cancelled itself'" in caplog.text


class _Silent(Exception):
    def __str__(self) -> str:
        raise AttributeError

    __repr__ = __str__


@pytest.mark.parametrize(
    ("value", "error", "rewards", "expected"),
    [
        pytest.param(None, "E: " + "x" * 1600, [1.0], (None, "E: xxx", [1.0]), id="a long error"),
        pytest.param(None, "😀" * 1600, [1.0], (None, "😀😀😀😀😀😀", [1.0]), id="of 12 bytes a character"),
        pytest.param("y" * 1600, None, [1.0], ("'yyyyy", None, [1.0]), id="a long value"),
        pytest.param(_Silent(), None, [], ("<_Sile", None, []), id="a value that cannot be shown"),
        pytest.param(0.5, None, [0.1] * 320, (None, "the ag", []), id="very many rewards"),
    ],
)
def test_whatever_a_job_ends_with_its_workers_message_is_one_that_the_runner_accepts(
    monkeypatch: pytest.MonkeyPatch,
    value: object,
    error: str | None,
    rewards: list[float],
    expected: tuple[object, str | None, list[float]],
) -> None:
    monkeypatch.setattr(_worker, "MAX_OUTCOME_BYTES", 1600)
    monkeypatch.setattr(_worker, "MAX_VALUE_CHARS", 100)
    outcome = JobOutcome(1, value, error, False, 0.5, AgentReport(2, False, rewards))
    line = _worker._encode(outcome)
    assert len(line) <= 1600
    message = decode(line)
    assert isinstance(message, JobOutcome)
    start = message.value and message.value[:6]
    assert (start, message.error and message.error[:6], message.report.rewards) == expected


def test_an_error_that_cannot_say_its_text_is_named_by_its_type() -> None:
    assert _worker._text(_Silent()) == "_Silent"


def test_the_span_of_an_agent_whose_error_cannot_say_its_text_is_sent(run: Run, recorder: OtlpRecorder) -> None:
    source = """
    class Silent(Exception):
        def __str__(self):
            raise AttributeError

        __repr__ = __str__

    def solve(task):
        raise Silent
    """
    assert run(source, tasks("x"), "agent:solve").status == {"agent_error": 1}
    agent = recorder.one("trainspan.agent")
    assert (agent.error, agent.message) == (True, "Silent")


def test_a_message_of_a_worker_with_other_fields_or_types_is_none() -> None:
    outcome = {
        "kind": "JobOutcome",
        "number": 1,
        "value": None,
        "error": None,
        "cancelled": False,
        "duration_s": 0.5,
        "report": GOOD,
    }
    decode(json.dumps(outcome).encode())
    for wrong in (
        {"number": "1"},
        {"error": 5},
        {"cancelled": 1},
        {"duration_s": "1"},
        {"report": {**GOOD, "rewards": 5}},
        {"report": None},
        {"more": 1},
        {"kind": "Cancel"},
        {"kind": []},
    ):
        with pytest.raises(InvalidRecordError, match="not a worker message"):
            decode(json.dumps({**outcome, **wrong}).encode())


def test_a_worker_that_dies_ends_its_rollout_though_a_child_holds_its_channel(run: Run, recorder: OtlpRecorder) -> None:
    source = """
    import os, pathlib, time

    def solve(task):
        if os.fork() == 0:
            pathlib.Path("child").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(7)
    """
    began_s = time.monotonic()
    result = run(source, tasks("x"), "agent:solve", timeout_s=50.0)
    assert time.monotonic() - began_s < 30
    assert result.status == {"agent_error": 1}
    assert statuses(recorder) == {("x", 0): "agent_error"}
    assert not is_running(int(Path("child").read_text()))
