"""A failure in any of our steps is logged once, without effect on the agent or other instrumentors."""

import importlib
import json
import operator
import subprocess
from pathlib import Path

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import environment, write
from tests.support.otlp.recorder import OtlpRecorder

STEPS = [
    "_hook:_begin_process",
    "_process.delivery:watch_exporters",
    "_rollout.span_processor:scope_in",
    "_process.process_span:from_environment",
    "_calls.http_clients:_wrap_httpx",
    "_calls.policy_request:current_scope",
    "_process.exits:_outcome",
    "_process.exits:process_span.begin_forked",
]
PLACES = [
    "_hook:_stamp_spans",
    "_instrumentors:_DEFERRED",
    "_process.delivery:getLogger",
    "_process.delivery:time",
    "_process.delivery:first_providers",
    "_process.providers:follow_providers",
    "_process.providers:add_processor",
    "_rollout.span_processor:RequestRollouts",
    "_rollout.span_processor:_identity_of",
    "_process.process_span:_own_rollout",
    "_process.process_span:export",
    "_process.process_span:end_open_rollouts",
    "_process.process_span:start_span",
    "_rollout.threads:watch_threads",
    "_rollout.threads:context",
    "_child_processes:current_scope",
    "_rollout.boundary:_wrap_socketserver",
    "_rollout.boundary:_wrap_uvicorn",
    "_calls.http_clients:prepare",
    "_calls.http_clients:_content",
    "_calls.policy_request:_parent_to_send",
    "_calls.policy_request:calling_agent",
    "_calls.policy_request:strip_identity",
    "_calls.policy_request:is_outside_of_requests",
    "_calls.agent_name:_stop_uploads",
    "_calls.agent_name:agent_of_body",
    "_rollout.scope:Scope.count",
    "_rollout.scope:Scope.outcome",
    "_process.exits:process_span.end",
    "_process.exits:delivery.before_fork",
    "_process.exits:delivery.after_fork_in_parent",
    "_process.exits:delivery.forget",
    "_process.exits:system_exit.forget",
    "_process.system_exit:_FirstImport",
    "_process.system_exit:only_raises",
]
"""Functions and modules that the steps use; none is guarded itself."""


def test_each_place_exists() -> None:
    for place in (*STEPS, *PLACES):
        module, _, path = place.partition(":")
        assert operator.attrgetter(path)(importlib.import_module(f"trainspan.{module}")), place


DRIVER = '''
"""Forks a child per place, which plants a fault there, starts like `opentelemetry-instrument`, and runs an agent."""

import concurrent.futures, importlib, json, os, sys
import openai, trainspan._hook, trainspan._worker
from opentelemetry import trace

PLACES = sys.argv[1:]


def fault(place):
    module, _, path = place.partition(":")
    names = path.split(".")
    owner = importlib.import_module(f"trainspan.{module}")
    for name in names[:-1]:
        owner = getattr(owner, name)

    getattr(owner, names[-1])  # the place is there
    setattr(owner, names[-1], Faulty(place))


class Faulty:
    """Raises at any use."""

    def __init__(self, place):
        self.__dict__.update({"__planted": place, "__name__": place})

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"planted in {self.__dict__['__planted']}")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self()


def agent(place):
    client = openai.OpenAI(max_retries=0)

    def ask(text):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
        return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content

    with trace.get_tracer("agent").start_as_current_span(f"work {place}"):
        assert ask(place) == "ok"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert list(pool.map(ask, [place])) == ["ok"]
    child = os.fork()
    if child == 0:
        assert ask(place) == "ok"
        sys.exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    sys.exit(3)


if __name__ == "__main__":
    running = {}
    for place in PLACES:
        child = os.fork()
        if child == 0:
            fault(place)
            import opentelemetry.instrumentation.auto_instrumentation.sitecustomize
            agent(place)
        running[child] = place
        if len(running) == 4 or place == PLACES[-1]:
            for pid, at in running.items():
                print(json.dumps([at, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]), flush=True)
            running = {}
'''


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "places",
    [
        pytest.param(STEPS, id="one a step", marks=pytest.mark.ci),
        pytest.param(PLACES, id="all others", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_breaks_neither_the_agent_nor_another_instrumentor(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str], places: list[str]
) -> None:
    program = str(write(tmp_path, DRIVER))
    ran = subprocess.run(
        ["python", program, *places],
        env=environment(wired | {"PYTHONPATH": ""}),
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    codes = dict(json.loads(line) for line in ran.stdout.splitlines())
    assert codes == dict.fromkeys(places, 3), ran.stderr[-4000:]
    assert "Traceback" not in ran.stderr
    asked = [request.body["messages"][-1]["content"] for request in policy.requests]
    assert {place: asked.count(place) for place in places} == dict.fromkeys(places, 3)
    works = {span.name.removeprefix("work "): span.trace_id for span in recorder.spans if span.name.startswith("work ")}
    chats = {span.trace_id for span in recorder.named("openai.chat")}
    silent = {place for place in places if works.get(place) not in chats}
    assert not silent, "the agent's own spans and those of the openai instrumentation arrive"
    reports = [line for line in ran.stderr.splitlines() if "event=step_failed" in line]
    assert reports
    assert all("planted in" in line for line in reports)
