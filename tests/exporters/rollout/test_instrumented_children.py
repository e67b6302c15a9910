"""Processes that an instrumented agent starts belong to its rollout, and its blocks end where they began."""

import json
from pathlib import Path

import pytest

from tests.exporters.process.test_instrumented_agents import ASK
from tests.support.agents.node_sdk import install_node_sender
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent

pytestmark = pytest.mark.ci


def test_under_a_runner_the_process_joins_the_runners_rollout_and_passes_it_to_its_children(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    identity = Identity("r1", run_id="run ä", task_id="t,1", attempt=2, round=3, split="val")
    parent = TraceParent("a" * 32, "b" * 16)
    reports = tmp_path / "reports"
    reports.mkdir()
    write(tmp_path, f"{ASK}\n    ask()", "child.py")
    source = f"""{ASK}
    import subprocess, trainspan
    from opentelemetry import baggage, trace

    with trainspan.rollout(task_id="ignored") as r:
        print(r.id, r.traceparent[3:35])
        ask()
    with trace.get_tracer("other").start_as_current_span("elsewhere", context=__import__("opentelemetry.context").context.Context()):
        ask()
    trainspan.reward(0.25)
    print(dict(baggage.get_all()))
    sys.stdout.flush()
    subprocess.run([sys.executable, "child.py"], check=True)
    sys.exit(1)
    """
    ran = run(
        write(tmp_path, source),
        {
            **wired,
            "TRAINSPAN_POLICY_URL": policy.url,
            "OPENAI_BASE_URL": f"{policy.url.removesuffix('/v1')}/rollout/{parent}/v1",
            "TRACEPARENT": str(parent),
            "BAGGAGE": identity.to_baggage() + ",mine=1",
            "TRAINSPAN_REPORT": str(reports),
        },
    )
    assert (ran.code, ran.stderr) == (1, "")
    assert ran.stdout == f"r1 {'a' * 32}\n{{'mine': '1'}}\n"
    child, process = recorder.named("trainspan.process")
    assert process.parent_span_id == parent.span_id
    assert child.parent_span_id == process.span_id
    assert process.attributes == {**identity.attributes(), keys.ROLLOUT_CALLS: 2}
    assert child.attributes == {**identity.attributes(), keys.ROLLOUT_CALLS: 1}
    assert not recorder.named("trainspan.rollout")
    assert {Identity.from_attributes(span.attributes) for span in recorder.spans} == {identity}
    assert [Identity.from_attributes(request.baggage) for request in policy.requests] == [identity] * 3
    # the server refuses a trace other than its URL's: the call in a foreign trace names the URL's parent
    assert {request.traceparent.trace_id for request in policy.requests if request.traceparent} == {"a" * 32}
    assert policy.requests[1].traceparent == parent
    assert sorted(path.read_text() for path in reports.iterdir()) == [
        '{"calls": 1, "policy_failing": false, "rewards": []}',
        '{"calls": 2, "policy_failing": false, "rewards": [0.25]}',
    ]


def test_forked_and_spawned_children_send_their_own_spans_under_the_process(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = f"""{ASK}
    import multiprocessing

    if __name__ == "__main__":
        ask()
        for method in ("fork", "spawn"):
            child = multiprocessing.get_context(method).Process(target=ask)
            child.start()
            child.join()
            print(child.exitcode)
        pid = os.fork()
        if pid == 0:
            ask()
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    ran = run(write(tmp_path, source), wired)
    assert (ran.code, ran.stdout, ran.stderr) == (0, "0\n0\n3\n", "")
    rollout = recorder.one("trainspan.rollout")
    children = recorder.named("trainspan.process")
    assert [child.parent_span_id for child in children] == [rollout.span_id] * 3
    assert [child.attributes[keys.ROLLOUT_CALLS] for child in children] == [1, 1, 1]
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 1
    assert len(recorder.named("openai.chat")) == 4
    assert {span.trace_id for span in recorder.spans} == {rollout.trace_id}


def test_a_block_ends_in_the_process_that_began_it_whatever_its_forked_children_do(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    """The children leave a block of their parent, by returning, by an exception and by exit, while another thread has one open."""
    source = f"""{ASK}
    import multiprocessing
    import threading
    import trainspan

    fork = multiprocessing.get_context("fork")

    def bad(_):
        raise ValueError("one bad tool")

    def other():
        with trainspan.rollout(task_id="other"):
            began.set()
            done.wait()

    began, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    began.wait()
    with trainspan.rollout(task_id="pool"):
        with fork.Pool(2) as pool:
            pool.map(abs, range(3))
    with trainspan.rollout(task_id="bad"):
        child = fork.Process(target=bad, args=(1,))
        sys.stderr = open(os.devnull, "w")
        child.start()
        child.join()
        sys.stderr = sys.__stderr__
    with trainspan.rollout(task_id="exit"):
        if os.fork() == 0:
            sys.exit(3)
        os.wait()
    with trainspan.rollout(task_id="joined"):
        with trainspan.rollout():
            if os.fork() == 0:
                raise SystemExit(4)
            os.wait()
    done.set()
    thread.join()
    """
    ran = run(write(tmp_path, source), wired)
    assert (ran.code, ran.stderr) == (0, "")
    ends = [(span.attributes.get(keys.TASK_ID), span.attributes.get(keys.ROLLOUT_STATUS)) for span in recorder.spans]
    for task in ("pool", "bad", "exit", "other"):
        assert [status for name, status in ends if name == task and status] == ["ok"], task
    assert [status for name, status in ends if name == "joined" and status] == ["ok"]
    assert len({span.span_id for span in recorder.spans}) == len(recorder.spans), "no span is sent twice"


def test_defaults_reach_children_only_if_they_mean_the_same_in_every_language(tmp_path: Path) -> None:
    program = write(tmp_path, "import json, os; print(json.dumps(dict(os.environ)))")
    nowhere = {**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    seen = json.loads(run(program, nowhere).stdout)
    assert seen["OTEL_BSP_SCHEDULE_DELAY"] == "200"
    assert not [name for name in seen if name.startswith("OTEL_") and "TIMEOUT" in name], (
        "seconds in Python, milliseconds elsewhere"
    )
    own = {"OTEL_EXPORTER_OTLP_TIMEOUT": "7", "OTEL_BSP_SCHEDULE_DELAY": "300"}
    assert json.loads(run(program, {**nowhere, **own}).stdout).items() >= own.items()


@pytest.mark.slow
@pytest.mark.network
def test_a_traced_node_program_that_an_agent_starts_sends_its_spans(tmp_path: Path, recorder: OtlpRecorder) -> None:
    install_node_sender(tmp_path)
    source = f"""
    import subprocess
    subprocess.run(["node", "send.mjs", "grpc", "{recorder.endpoint}", "none", "{{}}"], check=True)
    """
    ran = run(write(tmp_path, source), {"OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint})
    assert (ran.code, ran.stderr) == (0, "")
    assert len([span for span in recorder.spans if span.service == "node-agent"]) == 2
    assert recorder.one("trainspan.rollout").attributes[keys.ROLLOUT_STATUS] == "ok"
