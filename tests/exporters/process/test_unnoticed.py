"""An agent behaves as without trainspan: its pools end, and its exporters, children and signals remain its own."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.exporters.calls.test_own_clients import CALL
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, environment, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys

pytestmark = pytest.mark.ci

POOLS = """
    import multiprocessing, sys

    def square(x):
        return x * x

    if __name__ == "__main__":
        context = multiprocessing.get_context("{method}")
        for _ in range({pools}):
            with context.Pool(4) as pool:
                assert pool.map(square, range(8)) == [x * x for x in range(8)]
        print("done")
"""


@pytest.mark.parametrize(
    ("method", "pools"),
    [
        ("fork", 15),
        pytest.param("fork", 1000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
        pytest.param("spawn", 100, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
)
def test_process_pools_end(tmp_path: Path, wired: dict[str, str], method: str, pools: int) -> None:
    ran = run(
        write(tmp_path, POOLS.format(method=method, pools=pools)), wired | WITHOUT_OPENAI, timeout_s=60 + 3 * pools
    )
    assert (ran.code, ran.stdout, ran.stderr) == (0, "done\n", "")


IN_C = """
    import hashlib, os
    if {fork} and (child := os.fork()):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
        raise SystemExit
    print(os.getpid(), flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)  # minutes in C that no signal ends
"""


@pytest.mark.parametrize("forked", [False, True], ids=["the program", "a forked child"])
def test_sigterm_ends_a_program_whose_main_thread_never_returns_from_c(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str], forked: bool
) -> None:
    program = write(tmp_path, IN_C.format(fork=forked))
    started = subprocess.Popen(
        ["opentelemetry-instrument", "python", str(program)],
        env=environment(wired | WITHOUT_OPENAI), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert started.stdout is not None
        target = int(started.stdout.readline())
        assert (target != started.pid) is forked
        os.kill(target, signal.SIGTERM)
        _, stderr = started.communicate(timeout=20)
    finally:
        started.kill()
    assert (started.returncode, stderr) == (0 if forked else -signal.SIGTERM, "")
    assert len(recorder.named("trainspan.process")) == forked
    assert recorder.one(keys.ROLLOUT_SPAN_NAME).attributes[keys.ROLLOUT_STATUS] == ("ok" if forked else "cancelled")


def test_a_program_can_use_the_wakeup_descriptor_itself(tmp_path: Path, wired: dict[str, str]) -> None:
    source = """
        import os, signal, socket, time
        assert signal.set_wakeup_fd(-1) == -1
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        assert signal.set_wakeup_fd(theirs.fileno()) == -1
        signal.signal(signal.SIGUSR1, lambda *_: None)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ours.recv(1) == bytes([signal.SIGUSR1])
        if os.fork() == 0:
            assert signal.set_wakeup_fd(-1) == theirs.fileno()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
        assert signal.set_wakeup_fd(-1) == -1
    """
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr) == (0, "")


def test_a_python_of_another_environment_starts_as_without_instrumentation(
    tmp_path: Path, wired: dict[str, str]
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('the next sitecustomize')")
    source = f"""
        import os, subprocess, sys
        other = getattr(sys, "_base_executable")
        code = "import sys; print(sys.flags.no_site, 'opentelemetry' in sys.modules)"
        print(subprocess.run([other, "-c", code], capture_output=True, text=True))
        os.environ["PYTHONPATH"] += os.pathsep + {str(site)!r}
        print(subprocess.run([other, "-c", code], capture_output=True, text=True))
    """
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr) == (0, "")
    first, second = ran.stdout.splitlines()
    assert "stdout='0 False\\n', stderr=''" in first
    assert "stdout='the next sitecustomize\\n0 False\\n', stderr=''" in second


def test_a_python_of_the_same_environment_is_instrumented_at_any_depth(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = """
        import subprocess, sys
        depth = int(sys.argv[1]) if sys.argv[1:] else 0
        if depth < 2:
            subprocess.run([sys.executable, __file__, str(depth + 1)], check=True)
        print("trainspan._hook" in sys.modules)
    """
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr, ran.stdout) == (0, "", "True\nTrue\nTrue\n")
    assert len({span.trace_id for span in recorder.spans}) == 1


ASK = """
    import os, sys, subprocess
    import httpx

    def ask(text):
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body).raise_for_status()

"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("os.execv(sys.executable, [sys.executable, __file__, 'next'])", 3),
        ("os.execlp('python', 'python', __file__, 'next')", 3),
        ("os.execve(sys.executable, [sys.executable, __file__, 'next'], dict(os.environ, OWN='1'))", 3),
        ("os.execve('/no/such/program', ['x'], {})", 3),
        ("os.execve(__file__, [__file__], {})", 3),
    ],
)
def test_a_program_that_replaces_itself_is_one_rollout(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str], how: str, code: int
) -> None:
    source = (
        ASK
        + f"""
    ask("one")
    if sys.argv[1:] == ["next"]:
        sys.exit(3)
    try:
        {how}
    except OSError:
        ask("two")
        sys.exit(3)
    """
    )
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr) == (code, "")
    rollout = recorder.one(keys.ROLLOUT_SPAN_NAME)
    assert rollout.attributes[keys.ROLLOUT_STATUS] == "agent_error"
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 2
    assert {span.trace_id for span in recorder.spans} == {rollout.trace_id}


@pytest.mark.parametrize("delay_ms", [5000, 1], ids=["threads wait", "threads export"])
def test_under_gevent_the_program_ends_quietly_and_sends_all(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str], delay_ms: int
) -> None:
    source = """
        from time import sleep
        from gevent import events, monkey
        from opentelemetry import trace
        processors = trace.get_tracer_provider()._active_span_processor._span_processors
        (exporting,) = (one for one in processors if type(one).__name__ == "BatchSpanProcessor")
        batches = getattr(exporting, "_batch_processor", exporting)
        waker = "_worker_awaken" if hasattr(batches, "_worker_awaken") else "condition"  # its name up to 1.33
        old, left = getattr(batches, waker), []

        def during_the_patch(event):
            sleep(.05)  # more time for the exporting threads
            if getattr(event, "module_name", "") == "threading":
                left.append(getattr(batches, waker) is not old)

        events.subscribers.append(during_the_patch)
        monkey.patch_all()
        assert left and all(left), "no thread may wait on a patched lock"
        import os, time
        import gevent, httpx

        def ask(number):
            body = {"model": "policy", "messages": [{"role": "user", "content": str(number)}]}
            with trace.get_tracer("agent").start_as_current_span("work"):
                return httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body).status_code

        asked = [gevent.spawn(ask, number) for number in range(5)]
        gevent.joinall(asked)
        time.sleep(.5)
        print({greenlet.value for greenlet in asked})
    """
    delays = dict.fromkeys(("OTEL_BSP_SCHEDULE_DELAY", "OTEL_BLRP_SCHEDULE_DELAY"), str(delay_ms))
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI | delays, timeout_s=25)
    assert (ran.code, ran.stdout, ran.stderr) == (0, "{200}\n", "")
    rollout = recorder.one(keys.ROLLOUT_SPAN_NAME)
    assert (rollout.attributes[keys.ROLLOUT_STATUS], rollout.attributes[keys.ROLLOUT_CALLS]) == ("ok", 5)
    assert len(recorder.named("work")) == 5


def test_warnings_caused_only_by_instrumentors_are_dropped(tmp_path: Path, wired: dict[str, str]) -> None:
    source = """
        import openai
        from opentelemetry import trace
        from opentelemetry.instrumentation.openai import OpenAIInstrumentor

        OpenAIInstrumentor().instrument()
        messages = [{"role": "user", "content": "u"}]
        client = openai.OpenAI()
        client.chat.completions.create(model="policy", messages=messages, temperature=openai.omit, top_p=openai.omit)
        with trace.get_tracer("agent").start_as_current_span("own") as span:
            span.set_attribute("own", object)
    """
    ran = run(write(tmp_path, source), wired)
    assert ran.code == 0
    (line,) = ran.stderr.splitlines()
    assert line.startswith("Invalid type")
    assert "Omit" not in line


def test_warnings_as_errors_change_nothing(tmp_path: Path, wired: dict[str, str]) -> None:
    ran = run(write(tmp_path, CALL), wired | {"PYTHONWARNINGS": "error"})
    assert (ran.code, ran.stdout, ran.stderr) == (0, "", "")


def test_an_agent_that_fails_in_a_thread_pool_loses_no_call(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = (
        ASK
        + """
    from concurrent.futures import ThreadPoolExecutor

    def work(number):
        ask(str(number))
        if number == 3:
            raise ValueError("no answer")

    pool = ThreadPoolExecutor(4)
    for one in [pool.submit(work, number) for number in range(8)]:
        one.result()
    """
    )
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr.splitlines()[-1]) == (1, "ValueError: no answer")
    rollout = recorder.one(keys.ROLLOUT_SPAN_NAME)
    assert (rollout.attributes[keys.ROLLOUT_STATUS], rollout.attributes[keys.ROLLOUT_CALLS]) == ("agent_error", 8)
    assert len(policy.requests) == 8
