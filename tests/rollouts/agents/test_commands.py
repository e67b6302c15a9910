"""Command agents, and the command `trainspan rollout` itself."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.rollouts.agents.test_functions import rewards, rollouts, statuses, tasks
from tests.rollouts.conftest import Run, write_tasks
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, environment, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_cli import main
from trainspan_rollouts.executors import agent_process
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import TraceParent
from trainspan_schemas.telemetry.signing import KEY_FILE, signing_key

TRAINSPAN = [sys.executable, "-m", "trainspan_cli", "rollout"]


def test_a_command_gets_its_task_three_ways_and_its_calls_under_the_rollouts_url(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder, home: Path
) -> None:
    source = """
    import json, os, sys
    from openai import OpenAI
    import trainspan

    task = json.load(sys.stdin)
    assert task == json.loads(os.environ["TRAINSPAN_TASK"])
    OpenAI().chat.completions.create(model="policy", messages=[])
    trainspan.reward(100.0)
    print("x" * 100_000 + json.dumps([sys.argv[1:], sorted(task)]))
    """
    judge = """
    import json

    def judge(task, result):
        arguments, fields = json.loads(result.stdout_tail[result.stdout_tail.rindex("x[") + 1 :])
        assert (result.exit_code, result.value, len(result.stdout_tail)) == (0, None, 65536)
        return float(arguments == ["7*5?", "{other}", "t1"] and fields == ["id", "input"] and task["answer"] == 35)
    """
    Path("judges.py").write_text("\n".join(line[4:] for line in judge.splitlines()))
    task = {"id": "t1", "input": {"q": "7*5"}, "answer": 35}
    result = run(source, [task], "python", "agent.py", "{q}?", "{other}", "{id}", judge="judges:judge")
    assert (result.status, result.mean_reward, result.calls) == ({"ok": 1}, 1.0, 1)
    rollout = rollouts(recorder)["t1", 0]
    assert rewards(rollout) == [(1.0, "judge")]
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 1
    process = recorder.one("trainspan.process")
    assert (process.trace_id, process.parent_span_id) == (rollout.trace_id, rollout.span_id)
    assert keys.ROLLOUT_STATUS not in process.attributes
    (request,) = policy.requests
    parent = TraceParent(rollout.trace_id, rollout.span_id)
    signature = parent.signature(signing_key(str(home / KEY_FILE)))
    assert request.path == f"/rollout/{parent}.{signature}/v1/chat/completions"
    assert request.traceparent is not None
    assert request.traceparent.trace_id == rollout.trace_id
    assert request.baggage[keys.ROLLOUT_ID] == rollout.attributes[keys.ROLLOUT_ID]


@pytest.mark.ci
def test_a_command_that_fails_crashes_or_hangs_has_that_status_and_leaves_nothing_running(
    run: Run, tmp_path: Path, recorder: OtlpRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "GRACE_S", 0.5)
    source = """
    import os, pathlib, signal, subprocess, sys, time

    match sys.argv[1]:
        case "fail":
            sys.exit("no idea")
        case "again" if not pathlib.Path("tried").exists():
            pathlib.Path("tried").touch()
            sys.exit(75)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen(["sleep", "60"])
            pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(60)
    """
    command = ("python", "agent.py", "{input}")
    result = run(source, tasks("fail", "again", "killed"), *command, timeout_s=60.0, concurrency=2)
    assert result.status == {"agent_error": 2, "ok": 1}
    assert (result.mean_reward, result.rewarded) == (None, 0)
    assert run(source, tasks("hang"), *command, timeout_s=4.0).status == {"timeout": 1}
    assert statuses(recorder) == {
        ("fail", 0): "agent_error",
        ("again", 0): "infra_error",
        ("again", 1): "ok",
        ("killed", 0): "agent_error",
        ("hang", 0): "timeout",
    }
    for pid in (tmp_path / "pids").read_text().split():
        assert not is_running(int(pid))


def test_a_full_disk_is_an_infrastructure_failure(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    judge = "def judge(task, result):\n    import shutil\n    shutil.rmtree('temporary')\n    return 1.0"
    (tmp_path / "judges.py").write_text(judge)
    settings = {"judge": "judges:judge", "concurrency": 1, "judge_concurrency": 1, "retries": 0}
    result = run("", tasks("x", "y", "z"), "python", "agent.py", **settings)
    assert result.status["infra_error"] >= 1


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_command_prints_progress_and_result_as_json_lines(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder
) -> None:
    write(tmp_path, "def solve(task):\n    print('noise')\n    return len(task['input'])")
    path = write_tasks(tmp_path, {"id": "a", "input": "x"}, {"id": "b", "input": "xyz", "split": "val"})
    done = subprocess.run(
        [
            *TRAINSPAN,
            "--tasks",
            str(path),
            "--n",
            "3",
            "--run",
            "r",
            "--round",
            "2",
            "--format",
            "json",
            "agent.py:solve",
        ],
        env=environment(
            {**WITHOUT_OPENAI, "OPENAI_BASE_URL": policy.url, "TRAINSPAN_COLLECTOR__ENDPOINTS": recorder.endpoint}
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    *progress, result = map(json.loads, done.stdout.splitlines())
    assert progress[-1] == {
        "event": "progress",
        "done": 6,
        "failed": 0,
        "total": 6,
        "mean_reward": 2.0,
        "groups": 2,
        "oldest_round": None,
        "status": {"ok": 6},
        "rewarded": 6,
        "calls": 0,
    }
    seconds = result.pop("seconds")
    assert 0 < seconds < 60
    assert result == {
        "event": "result",
        "judge": {},
        "run_id": "r",
        "round": 2,
        "split": None,
        "total": 6,
        "status": {"ok": 6},
        "mean_reward": 2.0,
        "rewarded": 6,
        "calls": 0,
        "unacknowledged": 0,
        "resumed": 0,
        "unreported": 0,
    }
    # In threads, `print` writes a text and its line break separately.
    assert (done.stderr.count("noise"), done.stderr.replace("noise", "").strip()) == (6, "")
    splits = [span.attributes[keys.SPLIT] for span in recorder.named("trainspan.rollout")]
    assert sorted(splits) == ["train"] * 3 + ["val"] * 3


def test_wrong_usage_is_one_line_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tasks(tmp_path, {"id": "a", "input": "x"})
    (tmp_path / "broken.jsonl").write_text("{\n")
    done = subprocess.run(
        [*TRAINSPAN, "--tasks", str(path), "--format", "json", "--", "no-such-agent", "{input}"],
        env=environment({}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "command not found: 'no-such-agent'" in done.stderr
    monkeypatch.chdir(tmp_path)
    for code, arguments, message in (
        (1, ["--tasks", "broken.jsonl", "--format", "json"], "broken.jsonl:1: not JSON"),
        (2, ["--tasks", "tasks.jsonl", "--n", "0"], "n = 0: it must be at least 1"),
    ):
        assert main.run(["rollout", *arguments, "agent:solve"]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


@pytest.mark.ci
def test_a_missing_collector_is_reported_and_its_verdicts_are_left_to_send(tmp_path: Path) -> None:
    write(tmp_path, "def solve(task): raise KeyError('gone')")
    path = write_tasks(tmp_path, {"id": "a", "input": "x"})
    done = subprocess.run(
        [*TRAINSPAN, "--tasks", str(path), "--n", "2", "--format", "json", "agent:solve"],
        env=environment(
            {
                **WITHOUT_OPENAI,
                "TRAINSPAN_COLLECTOR__ENDPOINTS": "http://127.0.0.1:9",
                "TRAINSPAN_ROLLOUTS__DELIVER_TIMEOUT_S": "0.5",
            }
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 75
    assert (result["status"], result["unacknowledged"]) == ({"agent_error": 2}, 2)
    assert done.stderr.count("event=rollout_failed") == 1
    assert "KeyError: 'gone'" in done.stderr
    assert "event=verdicts_unacknowledged rollouts=2 collector=http://127.0.0.1:9" in done.stderr


def test_an_interrupt_ends_the_agents_and_sends_their_rollouts_as_cancelled(
    tmp_path: Path, recorder: OtlpRecorder
) -> None:
    source = """
    import os, pathlib, time

    def solve(task):
        pathlib.Path(f"started-{task['id']}").write_text(str(os.getpid()))
        time.sleep(60)
    """
    write(tmp_path, source)
    path = write_tasks(tmp_path, {"id": "a", "input": "x"}, {"id": "b", "input": "x"}, {"id": "c", "input": "x"})
    process = subprocess.Popen(
        [*TRAINSPAN, "--tasks", str(path), "--n", "1", "--concurrency", "2", "--format", "json", "agent:solve"],
        env=environment({**WITHOUT_OPENAI, "TRAINSPAN_COLLECTOR__ENDPOINTS": recorder.endpoint}),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 30
        while len(list(tmp_path.glob("started-*"))) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130
    finally:
        process.kill()
        process.wait()
    assert statuses(recorder) == {("a", 0): "cancelled", ("b", 0): "cancelled"}
    (pid,) = {int(started.read_text()) for started in tmp_path.glob("started-*")}
    assert not is_running(pid)


def test_a_task_too_long_for_an_environment_variable_or_an_argument_arrives_by_stdin_and_file(
    run: Run, recorder: OtlpRecorder
) -> None:
    source = """
    import json, os, sys

    task = json.load(sys.stdin)
    assert task == json.load(open(sys.argv[1])) == json.load(open(os.environ["TRAINSPAN_TASK_FILE"]))
    assert ("TRAINSPAN_TASK" in os.environ) == (len(task["input"]) < 131_020)
    print(len(task["input"]))
    """
    judge = "def judge(task, result):\n    return float(int(result.stdout_tail) == len(task['input']))\n"
    Path("length_judge.py").write_text(judge)
    given = [{"id": str(size), "input": "x" * size} for size in (10, 131_000, 131_100, 4_000_000)]
    result = run(source, given, "python", "agent.py", "{task_file}", judge="length_judge:judge")
    assert (result.status, result.mean_reward) == ({"ok": 4}, 1.0)


def test_a_task_too_long_for_an_argument_is_refused_with_a_workaround(
    run: Run, recorder: OtlpRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    result = run("", [{"id": "long", "input": "x" * 140_000}], "python", "agent.py", "{input}", retries=0)
    assert result.status == {"infra_error": 1}
    assert "pass {task_file}, or read the task from stdin" in caplog.text
