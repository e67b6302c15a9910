"""The agent name on a model call: the agent that made it."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, environment, run, write
from tests.support.agents.web_agent import AGENTS
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.agents.unnamed_agents import agent_of_body
from trainspan_schemas.telemetry import keys

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "You plan."}
USER = {"role": "user", "content": "Go."}


def name_of(**request: Any) -> str | None:
    return agent_of_body(json.dumps(request).encode())


def test_an_agent_without_a_name_is_identified_by_its_system_prompt_and_tools_alone() -> None:
    name = name_of(messages=[SYSTEM, USER], tools=[LOOK], temperature=1)
    assert name == "agent-658a0fbf", "in every process, and in stored traces"
    later = [SYSTEM, USER, {"role": "assistant", "content": "…"}, {"role": "user", "content": "More."}]
    assert name_of(tools=[LOOK], messages=later) == name
    assert name_of(messages=[SYSTEM, USER]) not in (name, None)
    assert name_of(messages=[{**SYSTEM, "content": "You write."}, USER], tools=[LOOK]) != name
    assert name_of(instructions="You plan.", input="Go.", tools=[LOOK]) == name
    assert name_of(system="You plan.", messages=[USER], tools=[LOOK]) == name


@pytest.mark.parametrize(
    "body", [None, b"", b"{", b"[]", b'{"messages": [{"role": "user", "content": "x"}]}', b'{"prompt": "x"}']
)
def test_a_request_without_a_sign_of_an_agent_has_no_name(body: bytes | None) -> None:
    assert agent_of_body(body) is None


def test_without_anything_else_the_service_is_the_agent(
    tmp_path: Path, policy: OpenAIServer, wired: dict[str, str]
) -> None:
    source = """
    from openai import OpenAI
    OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    """
    run(write(tmp_path, source), {**wired, "OTEL_SERVICE_NAME": "shop"})
    assert [request.baggage[keys.GEN_AI_AGENT_NAME] for request in policy.requests] == ["shop"]


def run_instrumented(program: Path, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """A program of a framework under `opentelemetry-instrument`, in the environment of the agents' frameworks."""
    return subprocess.run(
        ["opentelemetry-instrument", "python", str(program)],
        env={**environment(variables), "PATH": f"{AGENTS / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def dashboard() -> Iterator[OpenAIServer]:
    """The server to which the OpenAI Agents SDK would send its own traces."""
    with OpenAIServer() as server:
        yield server


@pytest.mark.ci
@pytest.mark.parametrize(
    ("setting", "uploads"),
    [
        pytest.param("", False, id="only the policy's key"),
        pytest.param("agents.set_tracing_disabled(True)", False, id="tracing disabled"),
        pytest.param("agents.set_tracing_export_api_key('own')", True, id="a key of its own"),
    ],
)
def test_the_openai_agents_sdk_names_its_agent_and_sends_no_traces_with_the_policys_key(
    tmp_path: Path,
    policy: OpenAIServer,
    recorder: OtlpRecorder,
    dashboard: OpenAIServer,
    wired: dict[str, str],
    setting: str,
    uploads: bool,
) -> None:
    source = f"""
    import os
    import agents
    from agents.tracing import default_exporter
    from openai import AsyncOpenAI

    default_exporter().endpoint = os.environ["DASHBOARD"]
    {setting}
    model = agents.OpenAIChatCompletionsModel("policy", AsyncOpenAI())
    print(agents.Runner.run_sync(agents.Agent(name="planner", instructions="You plan.", model=model), "Go.").final_output)
    """
    done = run_instrumented(write(tmp_path, source), {**wired, "DASHBOARD": dashboard.url})
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert [request.baggage[keys.GEN_AI_AGENT_NAME] for request in policy.requests] == ["planner"]
    assert bool(dashboard.requests) is uploads
    assert {request.headers["authorization"] for request in dashboard.requests} <= {"Bearer own"}
    assert recorder.one("trainspan.rollout").attributes[keys.ROLLOUT_STATUS] == "ok"


SMOLAGENTS = """
    import os
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent

    model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key="key")
    ToolCallingAgent([], model, name="clerk", description="Looks.", max_steps=1, verbosity_level=0).run("Go.")
    CodeAgent([], model, name="coder", description="Writes.", max_steps=1, verbosity_level=0, stream_outputs=True).run("Go.")
    CodeAgent([], model, max_steps=1, verbosity_level=0).run("Go.")
"""
AGNO = """
    import asyncio, os
    from agno.agent import Agent
    from agno.models.openai import OpenAILike
    from agno.team import Team

    def model():
        return OpenAILike("policy", base_url=os.environ["OPENAI_BASE_URL"], api_key="key")

    clerk = Agent(name="clerk", model=model(), instructions="Look.", telemetry=False)
    clerk.run("Go.")
    asyncio.run(clerk.arun("Go."))
    Team(name="store", members=[clerk], model=model(), telemetry=False).run("Go.")
    Agent(model=model(), instructions="Look.", telemetry=False).run("Go.")
"""


@pytest.mark.parametrize(
    ("source", "names"),
    [
        pytest.param(SMOLAGENTS, ["clerk", "clerk", "coder", "coder", "agent-", "agent-"], id="smolagents"),
        pytest.param(AGNO, ["clerk", "clerk", "store", "agent-"], id="agno"),
    ],
)
def test_frameworks_that_keep_no_current_agent_name_it_by_the_call_stack(
    tmp_path: Path, policy: OpenAIServer, wired: dict[str, str], source: str, names: list[str]
) -> None:
    done = run_instrumented(write(tmp_path, source), {**wired, **WITHOUT_OPENAI})
    assert done.returncode == 0, done.stderr
    sent = [request.baggage[keys.GEN_AI_AGENT_NAME] for request in policy.requests]
    assert [name[: len("agent-")] if name.startswith("agent-") else name for name in sent] == names


STREAMS_LEFT_EARLY = """
    import asyncio, os, trainspan
    import agents
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    graph = create_agent(ChatOpenAI(model="policy"), [], system_prompt="You are a clerk.", name="clerk")
    clerk = agents.Agent(
        name="clerk", instructions="Look.", model=agents.OpenAIChatCompletionsModel("policy", AsyncOpenAI())
    )

    def question(text):
        return {"messages": [{"role": "user", "content": text}]}

    def synchronous(text):
        with trainspan.rollout(task_id=text):
            for mode in ("updates", "messages"):
                for part in graph.stream(question(text), stream_mode=mode):
                    yield part

    async def asynchronous(text):
        async with trainspan.rollout(task_id=text):
            for _ in range(2):
                async for part in graph.astream(question(text), stream_mode="updates"):
                    yield part

    async def of_agents(text):
        async with trainspan.rollout(task_id=text):
            for _ in range(2):
                async for event in agents.Runner.run_streamed(clerk, text).stream_events():
                    yield event

    for number in range(2):
        for part in synchronous(f"graph {number}"):
            break
    for pair in zip(synchronous("zip 0"), synchronous("zip 1")):
        pass

    async def main():
        for number in range(2):
            async for part in asynchronous(f"async graph {number}"):
                break
            async for event in of_agents(f"agents {number}"):
                break
        await graph.ainvoke(question("outside"))
        async for event in of_agents("agents whole"):
            pass

    asyncio.run(main())
    graph.invoke(question("outside"))
"""


@pytest.mark.ci
def test_streams_of_frameworks_that_are_left_early_are_rollouts_of_their_own(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    done = run_instrumented(write(tmp_path, STREAMS_LEFT_EARLY), {**wired, **WITHOUT_OPENAI})
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "event=call_after_rollout;" not in line]
    assert not lines, "but that the Agents SDK goes on in the background when its stream is left"
    asked = [(request.body["messages"][-1]["content"], request.baggage) for request in policy.requests]
    expected = [(text, None if text == "outside" else text) for text, _ in asked]
    assert [(text, baggage.get(keys.TASK_ID)) for text, baggage in asked] == expected
    names = {
        *(f"{kind} {number}" for kind in ("graph", "zip", "async graph") for number in range(2)),
        "agents whole",
        "outside",
    }
    assert names <= {text for text, _ in asked}
    assert [text for text, _ in asked].count("agents whole") == 2
    rollouts = {span.attributes.get(keys.TASK_ID): span for span in recorder.named("trainspan.rollout")}
    assert len(rollouts) == len(recorder.named("trainspan.rollout")) == 10
    assert {span.attributes[keys.ROLLOUT_STATUS] for span in rollouts.values()} == {"ok"}
    assert rollouts[None].attributes[keys.ROLLOUT_CALLS] == 2
