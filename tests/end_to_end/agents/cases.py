"""The matrix: the frameworks, how they call the model, and which instrumentation is installed."""

from dataclasses import dataclass

__all__ = ["CASES", "FRAMEWORKS", "INSTRUMENTORS", "Case"]

INSTRUMENTORS = {
    "base": "base install",
    "traceloop": "traceloop added",
    "openinference": "OpenInference added",
}


@dataclass(frozen=True, slots=True)
class Framework:
    """A program of `examples/frameworks`; `modes` are (asynchronous, streaming)."""

    title: str
    program: str
    team: bool
    modes: tuple[tuple[bool, bool], ...]
    instrumentors: tuple[str, ...]
    options: tuple[str, ...] = ()


_ALL = ((False, False), (False, True), (True, False), (True, True))
_NO_SYNCHRONOUS_STREAM = ((False, False), (True, False), (True, True))
_ASYNCHRONOUS = ((True, False), (True, True))

FRAMEWORKS = {
    "openai": Framework("openai", "plain_openai.py", False, _ALL, ("base", "traceloop", "openinference")),
    "langgraph": Framework(
        "LangChain agent on LangGraph", "langgraph_agent.py", False, _ALL, ("base", "traceloop", "openinference")
    ),
    "langgraph-team": Framework(
        "LangGraph, two agents", "langgraph_team.py", True, _ALL, ("base", "traceloop", "openinference")
    ),
    "agents-chat": Framework(
        "OpenAI Agents SDK with hand-off, chat completions",
        "openai_agents_team.py",
        True,
        _NO_SYNCHRONOUS_STREAM,
        ("base", "traceloop", "openinference"),
    ),
    "agents-responses": Framework(
        "OpenAI Agents SDK with hand-off, Responses API",
        "openai_agents_team.py",
        True,
        _NO_SYNCHRONOUS_STREAM,
        ("base", "traceloop", "openinference"),
        ("--responses",),
    ),
    "autogen": Framework("AutoGen", "autogen_agent.py", False, _ASYNCHRONOUS, ("base", "traceloop", "openinference")),
    "autogen-team": Framework(
        "AutoGen, two agents", "autogen_team.py", True, _ASYNCHRONOUS, ("base", "traceloop", "openinference")
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    framework: str
    asynchronous: bool
    streaming: bool
    instrumentor: str

    @property
    def name(self) -> str:
        mode = ("async" if self.asynchronous else "sync") + ("-stream" if self.streaming else "")
        return f"{self.framework}-{mode}-{self.instrumentor}"

    @property
    def team(self) -> bool:
        return FRAMEWORKS[self.framework].team

    @property
    def command(self) -> list[str]:
        framework = FRAMEWORKS[self.framework]
        flags = ["--asynchronous"] * self.asynchronous + ["--stream"] * self.streaming
        return [framework.program, *framework.options, *flags]


CASES = tuple(
    Case(name, asynchronous, streaming, instrumentor)
    for name, framework in FRAMEWORKS.items()
    for asynchronous, streaming in framework.modes
    for instrumentor in framework.instrumentors
)
QUICK = frozenset(
    {
        "openai-sync-base",
        "openai-sync-traceloop",
        "openai-async-stream-openinference",
        "langgraph-sync-stream-base",
        "langgraph-async-traceloop",
        "langgraph-team-async-stream-openinference",
        "agents-chat-async-stream-traceloop",
        "agents-responses-sync-openinference",
        "agents-responses-async-stream-base",
        "autogen-async-stream-base",
        "autogen-team-async-openinference",
    }
)
"""Those in `make test`; all others are slow tests."""
