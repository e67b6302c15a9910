"""However an agent ends, its spans arrive, its rollout has the right status, and its exit is as without trainspan."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, environment, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan._hook import _is_helper
from trainspan_schemas.telemetry import keys


@pytest.mark.ci
@pytest.mark.parametrize(
    ("source", "code", "status"),
    [
        pytest.param("raise KeyError('x')", 1, "agent_error", id="an exception"),
        pytest.param("import sys\ndef main(): sys.exit(3)\nmain()", 3, "agent_error", id="sys.exit(3)"),
        pytest.param("import sys\nsys.exit('no')", 1, "agent_error", id="sys.exit with a message"),
        pytest.param(
            "import sys\ndef parse():\n    try: sys.exit(2)\n    except SystemExit: pass\nparse()\nsys.exit()",
            0,
            "ok",
            id="a caught sys.exit, then sys.exit()",
        ),
        pytest.param(
            "import asyncio, sys\nasync def main():\n    sys.exit(2)\ntry:\n    asyncio.run(main())\nfinally:\n    print()",
            2,
            "agent_error",
            id="sys.exit in a task below a finally",
        ),
        pytest.param("import colorsys\nraise SystemExit(3)", 3, "agent_error", id="a bare SystemExit(3)"),
        pytest.param(
            "import colorsys\ndef main():\n    return 4\nif __name__ == '__main__':\n    raise SystemExit(main())",
            4,
            "agent_error",
            id="a bare SystemExit(main())",
        ),
        pytest.param("import colorsys\nraise SystemExit", 0, "ok", id="a bare SystemExit"),
        pytest.param(
            "import colorsys\ntry:\n    raise SystemExit(3)\nexcept SystemExit:\n    pass",
            0,
            "ok",
            id="a caught SystemExit",
        ),
        pytest.param(
            "import colorsys\ntry:\n    raise SystemExit(3)\nexcept BaseException:\n    pass",
            0,
            "ok",
            id="a swallowed one",
        ),
        pytest.param("import colorsys\nexit(5)", 5, "agent_error", id="exit(5)"),
        pytest.param("import os\nos._exit(4)", 4, "agent_error", id="os._exit(4)"),
        pytest.param("import os\nos._exit(0)", 0, "ok", id="os._exit(0)"),
        pytest.param("raise KeyboardInterrupt", -signal.SIGINT, "cancelled", id="Ctrl-C"),
        pytest.param(
            "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
            0,
            "ok",
            id="an exception in a thread",
        ),
    ],
)
def test_an_ending_process_sends_its_rollout_with_its_status(
    tmp_path: Path, recorder: OtlpRecorder, source: str, code: int, status: str
) -> None:
    ran = run(write(tmp_path, source), {**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint})
    assert ran.code == code
    assert recorder.one("trainspan.rollout").attributes[keys.ROLLOUT_STATUS] == status
    assert "event=" not in ran.stderr


@pytest.mark.parametrize("own_handler", [False, True])
def test_sigterm_flushes_without_a_handler_and_leaves_the_programs_own_handler_alone(
    tmp_path: Path, recorder: OtlpRecorder, own_handler: bool
) -> None:
    install = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))" if own_handler else ""
    source = f"""
    import signal, sys, time
    import trainspan
    {install}
    with trainspan.rollout(task_id="open"):
        print("ready", flush=True)
        time.sleep(30)
    """
    process = subprocess.Popen(
        ["opentelemetry-instrument", "python", str(write(tmp_path, source))],
        env=environment({**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(10) == (7 if own_handler else -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        process.stdout.close() if process.stdout else None
    statuses = {
        span.attributes.get(keys.TASK_ID): span.attributes.get(keys.ROLLOUT_STATUS)
        for span in recorder.named("trainspan.rollout")
    }
    assert statuses == {"open": "agent_error" if own_handler else "cancelled", None: None}


@pytest.mark.parametrize("own_wakeup", [False, True], ids=["", "with a wakeup descriptor of its own"])
@pytest.mark.parametrize(
    "flush", ["pass", "trace.get_tracer_provider().force_flush(); time.sleep(30)"], ids=["end", "middle"]
)
def test_sigterm_during_an_export_of_the_main_thread_loses_no_span_and_no_time(
    tmp_path: Path, recorder: OtlpRecorder, flush: str, own_wakeup: bool
) -> None:
    source = f"""
    import importlib.util, os, signal, socket, threading, time
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    ends = socket.socketpair()
    ends[1].setblocking(False)
    if {own_wakeup}:
        signal.set_wakeup_fd(ends[1].fileno())
    export = OTLPSpanExporter.export
    main_thread_exports = importlib.util.find_spec("opentelemetry.sdk._shared_internal")  # not in the lowest release

    def interrupted(self, spans):
        if threading.current_thread() is threading.main_thread() or not main_thread_exports:
            OTLPSpanExporter.export = export
            print(time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        return export(self, spans)

    OTLPSpanExporter.export = interrupted
    for number in range(20):
        trace.get_tracer("agent").start_span(f"work {{number}}").end()
    {flush}
    """
    ran = run(write(tmp_path, source), {**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint})
    took_s = time.monotonic() - float(ran.stdout)
    assert (ran.code, ran.stderr) == (-signal.SIGTERM, "")
    assert took_s < 2.4, "it did not wait for a lock of the thread that it had stopped"
    assert [recorder.one(f"work {number}").error for number in range(20)] == [False] * 20
    recorder.one("trainspan.rollout")


def test_a_main_module_that_catches_system_exit_keeps_the_built_in_one(tmp_path: Path, recorder: OtlpRecorder) -> None:
    write(tmp_path, "def leave():\n    raise SystemExit(3)", "library.py")
    source = """
    import builtins, library
    try:
        library.leave()
    except SystemExit as error:
        print(error.code, SystemExit is builtins.SystemExit)
    """
    ran = run(write(tmp_path, source), {**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint})
    assert (ran.code, ran.stdout, ran.stderr) == (0, "3 True\n", "")


def test_sigkill_loses_only_the_last_fraction_of_a_second(tmp_path: Path, recorder: OtlpRecorder) -> None:
    source = """
    import sys, time, trainspan
    from opentelemetry import trace
    trace.get_tracer("agent").start_span("work").end()
    trainspan.reward(1.0)
    print("working", flush=True)
    time.sleep(60)
    """
    process = subprocess.Popen(
        ["opentelemetry-instrument", "python", str(write(tmp_path, source))],
        env=environment({**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        recorder.wait_for(lambda seen: bool(seen.spans) and bool(seen.logs))
    finally:
        process.kill()
        process.communicate()
    rollout_id = recorder.one("work").attributes[keys.ROLLOUT_ID]
    assert recorder.logs[0].attributes[keys.ROLLOUT_ID] == rollout_id


@pytest.mark.ci
@pytest.mark.parametrize("pool", ["multiprocessing.Pool(2)", "concurrent.futures.ProcessPoolExecutor(2)"])
def test_the_workers_of_a_process_pool_send_their_spans(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str], pool: str
) -> None:
    source = f"""
    import concurrent.futures, multiprocessing
    from openai import OpenAI

    def ask(text):
        client = OpenAI()
        return client.chat.completions.create(model="policy", messages=[{{"role": "user", "content": text}}]).id

    if __name__ == "__main__":
        with {pool} as pool:
            print(len(list(pool.map(ask, "abcd"))))
    """
    ran = run(write(tmp_path, source), wired)
    assert (ran.code, ran.stdout) == (0, "4\n")
    rollout = recorder.one("trainspan.rollout")
    chats = recorder.named("openai.chat")
    assert len(chats) == 4
    assert {span.trace_id for span in chats} == {rollout.trace_id}
    assert {request.baggage[keys.ROLLOUT_ID] for request in policy.requests} == {rollout.attributes[keys.ROLLOUT_ID]}
    assert sum(span.attributes[keys.ROLLOUT_CALLS] for span in recorder.named("trainspan.process")) == 4


@pytest.mark.ci
def test_without_a_policy_server_the_agent_sees_the_usual_error(tmp_path: Path, recorder: OtlpRecorder) -> None:
    source = """
    from openai import OpenAI
    try:
        OpenAI(max_retries=0).chat.completions.create(model="policy", messages=[])
    except Exception as error:
        print(type(error).__name__, type(error.__cause__).__name__)
    """
    agent = write(tmp_path, source)
    wired = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "key"}
    plain = run(agent, wired, instrument=False)
    ran = run(agent, {**wired, "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint})
    assert (ran.code, ran.stdout, ran.stderr) == (plain.code, plain.stdout, plain.stderr)
    assert ran.stdout.startswith("APIConnectionError")
    assert recorder.one("trainspan.rollout").attributes[keys.ROLLOUT_CALLS] == 0


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"], True),
        (["/venv/bin/python", "/venv/bin/opentelemetry-instrument", "python", "agent.py"], True),
        (["python", "agent.py", "opentelemetry-instrument"], False),
        (["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"], False),
    ],
)
def test_helper_processes_are_not_agents(argv: list[str], expected: bool) -> None:
    assert _is_helper(argv) is expected
