"""A killed run resumes where it stopped, and does not repeat finished rollouts."""

import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts.agents.test_functions import rollouts, statuses, tasks
from tests.rollouts.conftest import Run, write_tasks
from tests.support.agents.programs import WITHOUT_OPENAI, environment, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts.judges.choice import find_judge
from trainspan_rollouts.ledger.paths import ledger_file
from trainspan_rollouts.ledger.recorded import recorded_agent, task_outcomes
from trainspan_rollouts.ledger.recorded import statuses as statuses_of
from trainspan_rollouts.ledger.run_ledger import RunLedger
from trainspan_rollouts.records import Shard
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity

NOBODY = "http://127.0.0.1:9/v1"
"""A policy server that does not answer."""
UNLUCKY = """
import json, os, pathlib, sys

kind = sys.argv[1]
if kind == "again" and not pathlib.Path("fixed").exists():
    report = {"calls": 0, "policy_failing": True, "rewards": []}
    pathlib.Path(os.environ["TRAINSPAN_REPORT"], "0.json").write_text(json.dumps(report))
    sys.exit(1)
sys.exit(3 if kind == "bad" else 0)
"""
"""The agent reports that the policy server fails, as its instrumentation would."""
AGENT = """
import pathlib, time

def solve(task):
    with open("ran.txt", "a") as file:
        file.write(task["id"] + "\\n")
    if pathlib.Path("slow").exists():
        time.sleep(0.15)
    return float(task["id"])
"""


def trainspan_rollout(tmp_path: Path, recorder: OtlpRecorder, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trainspan_cli", "rollout", "--tasks", "tasks.jsonl", "--n", "2", "--run", "r"]
    command += ["--round", "4", "--concurrency", "3", "--format", "json", *arguments, "agent.py:solve"]
    own = {"TRAINSPAN_COLLECTOR__ENDPOINTS": recorder.endpoint, "TRAINSPAN_HOME": str(tmp_path / "home")}
    environ = environment({**WITHOUT_OPENAI, **own})
    return subprocess.Popen(command, env=environ, cwd=tmp_path, text=True, stdout=subprocess.PIPE)


def result_of(process: "subprocess.Popen[str]", code: int = 0) -> dict[str, Any]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@pytest.mark.ci
def test_a_killed_run_is_resumed_without_repeating_what_is_finished(tmp_path: Path, recorder: OtlpRecorder) -> None:
    write(tmp_path, AGENT)
    (tmp_path / "slow").touch()
    write_tasks(tmp_path, *({"id": str(number), "input": "x"} for number in range(30)))
    killed = trainspan_rollout(tmp_path, recorder)
    ledger = tmp_path / "home" / "rollouts" / "r" / "round-0004.jsonl"
    deadline = time.monotonic() + 60
    while not ledger.exists() or ledger.read_text().count('"end"') < 10:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    time.sleep(0.5)  # its worker has noticed and exited
    with ledger.open("a") as file:
        file.write('{"begin": "half a li')
    finished = ledger.read_text().count('"end"')
    delivered = len(recorder.named("trainspan.rollout"))
    assert delivered - finished <= 3  # acknowledged, but killed before that was recorded
    ran = Counter((tmp_path / "ran.txt").read_text().split())
    (tmp_path / "slow").unlink()

    result = result_of(trainspan_rollout(tmp_path, recorder, "--resume"))
    assert (result["total"], result["status"], result["resumed"]) == (60, {"ok": 60}, finished)
    assert result["mean_reward"] == sum(range(30)) / 30
    found = [span.attributes for span in recorder.named("trainspan.rollout")]
    assert len({attributes[keys.ROLLOUT_ID] for attributes in found}) == 60
    attempts = Counter(attributes[keys.ATTEMPT] for attributes in found)
    assert attempts[1] <= 3 + 3  # rollouts running at the kill continue as the next attempt of the same rollout
    last = {attributes[keys.ROLLOUT_ID] for attributes in found if attributes[keys.ATTEMPT] == 1}
    killed_ones = [span for span in found if span[keys.ATTEMPT] == 0 and span[keys.ROLLOUT_ID] in last]
    told = Counter((span[keys.RUN_ID], span[keys.ROUND], span[keys.ROLLOUT_STATUS]) for span in killed_ones)
    assert told["r", 4, "cancelled"] == attempts[1] > 0
    assert {span[keys.ROLLOUT_OWN_REWARD] for span in found} == {True}, "no judge, also of those that were killed"
    assert ledger.stat().st_mode & 0o077 == 0, "a trace's id is as good as the right to reward it"
    assert sum(Counter((tmp_path / "ran.txt").read_text().split()).values()) - sum(ran.values()) == 60 - finished

    again = result_of(trainspan_rollout(tmp_path, recorder, "--resume"))
    assert (again["status"], again["resumed"], again["mean_reward"]) == ({"ok": 60}, 60, sum(range(30)) / 30)


@pytest.mark.ci
def test_the_exit_code_says_whether_a_resumed_run_has_something_to_do(tmp_path: Path, recorder: OtlpRecorder) -> None:
    write(tmp_path, UNLUCKY)
    target = ("--", "python", "agent.py", "{input}")

    def run(run_id: str, code: int, *options: str) -> dict[str, Any]:
        own = {"TRAINSPAN_COLLECTOR__ENDPOINTS": recorder.endpoint, "TRAINSPAN_HOME": str(tmp_path / "home")}
        command = [
            sys.executable,
            "-m",
            "trainspan_cli",
            "rollout",
            "--tasks",
            "tasks.jsonl",
            "--n",
            "1",
            "--retries",
            "0",
            "--policy-url",
            NOBODY,
        ]
        process = subprocess.Popen(
            [*command, "--run", run_id, "--format", "json", *options, *target],
            env=environment({**WITHOUT_OPENAI, **own}),
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
        )
        return result_of(process, code)

    write_tasks(tmp_path, *({"id": name, "input": name} for name in ("good", "bad", "again")))
    assert run("outage", 75)["status"] == {"agent_error": 1, "infra_error": 1, "ok": 1}
    (tmp_path / "fixed").touch()
    assert run("outage", 0, "--resume")["status"] == {"agent_error": 1, "ok": 2}
    write_tasks(tmp_path, {"id": "bad", "input": "bad"})
    run("none-ok", 1)
    run("part", 0, "--shard", "0/2")


def test_infrastructure_failures_are_retried(run: Run, recorder: OtlpRecorder) -> None:
    command = ("python", "agent.py", "{input}")
    first = run(UNLUCKY, tasks("good", "bad", "again"), *command, retries=0, policy_url=NOBODY)
    assert (first.status, first.resumed) == ({"agent_error": 1, "infra_error": 1, "ok": 1}, 0)
    Path("fixed").touch()
    second = run(UNLUCKY, tasks("good", "bad", "again"), *command, retries=0, resume=True)
    assert (second.status, second.resumed) == ({"agent_error": 1, "ok": 2}, 2)
    assert statuses(recorder) == {
        ("good", 0): "ok",
        ("bad", 0): "agent_error",
        ("again", 0): "infra_error",
        ("again", 1): "ok",
    }
    found = rollouts(recorder)
    assert found["again", 0].attributes[keys.ROLLOUT_ID] == found["again", 1].attributes[keys.ROLLOUT_ID]


def test_a_limit_runs_only_the_first_tasks_and_a_resumed_run_may_raise_it(run: Run, recorder: OtlpRecorder) -> None:
    source = "def solve(task): return 1"
    marked = [{**task, "split": "val" if task["id"] == "0" else "train"} for task in tasks(*range(5))]
    first = run(source, marked, "agent:solve", n=2, limit=2, split="train")
    assert (first.total, first.status) == (4, {"ok": 4})
    more = run(source, marked, "agent:solve", n=2, limit=3, split="train", resume=True)
    assert (more.total, more.resumed) == (6, 4)
    done = Counter(span.attributes[keys.TASK_ID] for span in recorder.named("trainspan.rollout"))
    assert done == {"1": 2, "2": 2, "3": 2}
    assert run(source, marked, "agent:solve", limit=9).total == 5
    with pytest.raises(UsageError, match="limit = 0: it must be at least 1 task"):
        run(source, marked, "agent:solve", limit=0)


def test_nothing_to_resume_and_another_target_are_errors(run: Run) -> None:
    source = "def solve(task): pass\ndef other(task): pass"
    with pytest.raises(UsageError, match=r"nothing to resume: .* does not exist"):
        run(source, tasks("x"), "agent:solve", resume=True)
    assert run(source, tasks("x"), "agent:solve").total == 1
    with pytest.raises(
        UsageError, match=r"cannot resume .*: its target is \['agent:solve'\], not \['agent:other'\]; undo the change"
    ):
        run(source, tasks("x"), "agent:other", resume=True)
    assert run(source, tasks("x"), "agent:other").resumed == 0  # without --resume a run starts over


@pytest.mark.parametrize("changed", [{"input": "y"}, {"answer": 2}, {"meta": {"level": 2}}])
def test_a_task_that_changed_since_its_rollouts_began_is_not_resumed(run: Run, changed: dict[str, Any]) -> None:
    """Further tasks may come, and what earlier processes finished of the others is not repeated."""
    source = "def solve(task): pass"
    first = {"id": "a", "input": "x", "answer": 1}
    assert run(source, [first], "agent:solve").total == 1
    with pytest.raises(UsageError, match="cannot resume: the task 'a' is not what it was when its rollouts ran"):
        run(source, [{**first, **changed}], "agent:solve", resume=True)
    more = run(source, [first, {"id": "b", "input": "y"}], "agent:solve", resume=True)
    assert (more.total, more.resumed) == (2, 1)


def test_a_run_is_not_resumed_with_another_number_of_rollouts_per_task(run: Run) -> None:
    """A group of spans that state its size as 2, and others as 3, would be no group."""
    source = "def solve(task): pass"
    assert run(source, tasks("x"), "agent:solve", n=2).total == 2
    with pytest.raises(UsageError, match="its n is 2, not 3"):
        run(source, tasks("x"), "agent:solve", n=3, resume=True)


def test_a_runner_whose_opentelemetry_is_off_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", " True ")
    with pytest.raises(UsageError, match="OTEL_SDK_DISABLED is true"):
        run("def solve(task): pass", tasks("x"), "agent:solve")


def test_a_run_is_not_resumed_with_another_judge_whose_verdicts_would_be_compared_with_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "def strict(task, result): return 0.0\nlenient = strict\n"
    Path("resumed_judge.py").write_text(code)

    def resumed(judge: str | None, *, resume: bool = True) -> None:
        file = tmp_path / "ledger.jsonl"
        named = None if judge is None else (judge, find_judge(judge, 1.0).digest)
        RunLedger(file, 0, Path("tasks.jsonl"), ["agent:solve"], 8, resume=resume, judge=named).close()

    resumed("resumed_judge.py:strict", resume=False)
    resumed("resumed_judge.py:strict")
    with pytest.raises(UsageError, match=r"its judge is resumed_judge.py:strict, not resumed_judge.py:lenient"):
        resumed("resumed_judge.py:lenient")
    with pytest.raises(UsageError, match=r"its judge is resumed_judge.py:strict, not None"):
        resumed(None)
    Path("resumed_judge.py").write_text(code.replace("0.0", "1.0"))
    advice = r"undo the change, or begin another run \(another --run; a loop: without --resume\)"
    with pytest.raises(UsageError, match=rf"ledger\.jsonl: its judge_sha256 is .*; {advice}"):
        resumed("resumed_judge.py:strict")


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    ledger = RunLedger(file, 0, Path("tasks.jsonl"), ["agent:solve"], 8, resume=False)
    ledger.record_start(Identity("first", task_id="a", round=0), 0, "digest")
    size = file.stat().st_size
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, most))
    try:
        with pytest.raises(OSError, match="too large"):
            ledger.record_start(Identity("second", task_id="b", round=0), 0, "digest")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert file.stat().st_size == size
    ledger.record_end(Identity("first", task_id="a", round=0), 0, "ok", 1.0)
    ledger.delivered("first", 0)
    ledger.close()
    assert statuses_of(file) == (1, {"ok": 1}, [1.0])


def test_a_rollout_in_another_attempt_has_not_ended(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    with contextlib.closing(RunLedger(file, 0, Path("tasks.jsonl"), ["agent:solve"], 8, resume=False)) as ledger:
        for attempt, status, reward in ((0, "infra_error", None), (1, "ok", 0.5)):
            identity = Identity("first", task_id="a", round=0, attempt=attempt)
            ledger.record_start(identity, 0, "digest")
            assert statuses_of(file) == (1, {}, [])
            ledger.record_end(identity, 0, status, reward)
            ledger.delivered("first", attempt)
            assert statuses_of(file) == (1, {status: 1}, [] if reward is None else [reward])


@pytest.mark.parametrize("left", [b"", b'{"tasks": "/ta', b"\0\0\0\n"])
def test_a_ledger_whose_first_line_was_not_written_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: bytes
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    file, target = ledger_file("run", 0, None, Shard(0, 1)), ("agent:solve",)
    file.parent.mkdir(parents=True)
    file.write_bytes(left)  # of a process that found a full disk, or was killed, or lost its power
    assert recorded_agent("run", 0, None) is None
    assert f"event=ledger_head_damaged file={file}" in caplog.text
    for _ in range(2):
        RunLedger(file, 0, Path("tasks.jsonl"), target, 8, resume=True).close()
    assert len(file.read_text().splitlines()) == 1
    recorded = recorded_agent("run", 0, None)
    assert recorded is not None
    assert recorded[1].target == target


def test_a_ledger_with_rollouts_after_a_damaged_first_line_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Its rollouts are in the store: made again, they would be compared with the new ones."""
    file = tmp_path / "ledger.jsonl"
    RunLedger(file, 0, Path("tasks.jsonl"), ["agent:solve"], 8, resume=False).close()
    damaged = b"\0" * 20 + b"\n" + b'{"begin": 1}\n'
    file.write_bytes(damaged)
    with pytest.raises(UsageError, match=r"cannot resume .*ledger.jsonl: its first line is damaged"):
        RunLedger(file, 0, Path("tasks.jsonl"), ["agent:solve"], 8, resume=True)
    assert file.read_bytes() == damaged


def test_a_damaged_line_is_counted_and_the_others_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "ledger.jsonl"
    with contextlib.closing(RunLedger(file, 0, Path("tasks.jsonl"), ["agent:solve"], 8, resume=False)) as ledger:
        ledger.record_start(Identity("first", task_id="a", round=0), 0, "digest")
    with file.open("a") as lines:
        lines.write('{"begin": "0:b", "roll{"begin": "0:c", "rollout": "third", "attempt": 0, "task": ""}\n')
    assert statuses_of(file)[0] == 1
    with contextlib.closing(RunLedger(file, 0, Path("tasks.jsonl"), ["agent:solve"], 8, resume=True)) as again:
        assert again.begun(0, "a", 0) is not None
        assert again.begun(0, "b", 0) is None
    assert caplog.text.count("event=ledger_lines_damaged") == 2


@pytest.mark.parametrize("status", ["infra_error", "cancelled", None])
def test_a_verdict_does_not_survive_a_later_attempt_that_has_none(tmp_path: Path, status: Any) -> None:
    """A group whose rollouts are compared is repeated whole, so one that had ended begins again."""
    file = tmp_path / "ledger.jsonl"

    def ledger(*, resume: bool) -> RunLedger:
        return RunLedger(file, 0, Path("tasks.jsonl"), ["agent:solve"], 8, resume=resume)

    with contextlib.closing(ledger(resume=False)) as first:
        first.record_start(Identity("A", "run", "t", 0, 0), 0, "digest")
        first.record_end(Identity("A", "run", "t", 0, 0), 0, "ok", 1.0)
        first.delivered("A", 0)
    with contextlib.closing(ledger(resume=True)) as second:
        assert second.finished(0, "t", 0) is not None
        second.record_start(Identity("A", "run", "t", 1, 0), 0, "digest")
        assert task_outcomes(file) == {}
        if status:
            second.record_end(Identity("A", "run", "t", 1, 0), 0, status, None)
            second.delivered("A", 1)
    with contextlib.closing(ledger(resume=True)) as third:
        assert third.finished(0, "t", 0) is None
