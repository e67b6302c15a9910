"""The matrix: frameworks and kinds of agents, each with an ordinary program that does not use trainspan."""

from dataclasses import dataclass

__all__ = ["CASES", "MODES", "UNTRIED", "Case"]

MODES = ("free", "strict")
"""The program's demands on the answers: none; or a required or strict tool or a schema (the flag `--strict`)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A program of `programs/`, and what is needed to run it."""

    name: str
    title: str
    program: str
    requirements: tuple[str, ...] = ()
    agent: str = "agent-"
    """Agent name of all its calls, or its first characters: an agent without a name gets a hash."""
    modes: tuple[str, ...] = MODES

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")

    @property
    def is_go(self) -> bool:
        return self.program.endswith(".go")

    @property
    def is_python(self) -> bool:
        """Others are started by `trainspan rollout`: `opentelemetry-instrument` makes a rollout of Python programs only."""
        return self.program.endswith((".py", ".ipynb"))

    @property
    def command(self) -> list[str]:
        """The command that takes the program as an argument; a Go program is compiled."""
        commands = {"py": ["python"], "ipynb": ["jupyter", "execute"], "mjs": ["node"], "sh": ["bash"]}
        return commands[self.program.rpartition(".")[2]]


CASES: tuple[Case, ...] = (
    Case("openai", "openai", "clients/openai_sdk.py", ("openai",)),
    Case("openai-responses", "openai, Responses API", "clients/openai_responses.py", ("openai",)),
    Case("anthropic", "anthropic", "clients/anthropic_sdk.py", ("anthropic",)),
    Case("litellm", "LiteLLM", "clients/litellm_calls.py", ("litellm",)),
    Case("instructor", "Instructor", "clients/instructor_models.py", ("instructor",)),
    Case("mirascope", "Mirascope", "clients/mirascope_calls.py", ("mirascope[openai]",)),
    Case("requests", "requests", "clients/raw_requests.py", ("requests",)),
    Case("aiohttp", "aiohttp", "clients/raw_aiohttp.py", ("aiohttp",)),
    Case(
        "notebook",
        "openai in `jupyter execute`",
        "clients/notebook.ipynb",
        ("openai", "nbclient", "ipykernel"),
        modes=("free",),
    ),
    Case("curl", "bash and curl", "clients/curl.sh"),
    Case("langchain", "LangChain", "agents/langchain_agent.py", ("langchain", "langchain-openai"), "clerk"),
    Case("deepagents", "Deep Agents", "agents/deep_agent.py", ("deepagents", "langchain-openai"), "clerk"),
    Case("openai-agents", "OpenAI Agents SDK", "agents/openai_agents.py", ("openai-agents",), "clerk"),
    Case("autogen", "AutoGen", "agents/autogen_agent.py", ("autogen-agentchat", "autogen-ext[openai]"), "clerk"),
    Case("pydantic-ai", "Pydantic AI", "agents/pydantic_agent.py", ("pydantic-ai-slim[openai]",), "clerk"),
    Case("smolagents", "smolagents", "agents/smol_agent.py", ("smolagents[openai]",), "clerk"),
    Case("agno", "Agno", "agents/agno_agent.py", ("agno", "openai"), "clerk"),
    Case("crewai", "CrewAI", "agents/crew.py", ("crewai",), "clerk"),
    Case("semantic-kernel", "Semantic Kernel", "agents/kernel_agent.py", ("semantic-kernel",), "clerk"),
    Case("strands", "Strands Agents", "agents/strands_agent.py", ("strands-agents[openai]",), "clerk"),
    Case(
        "google-adk", "Google ADK with LiteLLM", "agents/adk_agent.py", ("google-adk>=2.13", "litellm", "mcp"), "clerk"
    ),
    Case("dspy", "DSPy", "agents/dspy_module.py", ("dspy",)),
    Case(
        "llama-index",
        "LlamaIndex",
        "agents/llama_agent.py",
        ("llama-index-core", "llama-index-llms-openai-like"),
        "clerk",
    ),
    Case("haystack", "Haystack", "agents/haystack_agent.py", ("haystack-ai",)),
    Case("ag2", "AG2", "agents/ag2_agent.py", ("ag2[openai]",), "clerk"),
    Case("node-openai", "openai for Node", "node/openai_sdk.mjs", ("openai",)),
    Case("vercel-ai", "Vercel AI SDK", "node/vercel_ai.mjs", ("ai",)),
    Case("langchain-js", "LangChain.js", "node/langchain_agent.mjs", ("langchain",)),
    Case("go", "OpenTelemetry for Go", "go/own_telemetry.go"),
)

UNTRIED: dict[str, str] = {
    "CAMEL": "needs tiktoken's vocabulary from the network, and mcp before 2",
    "Langroid, Griptape, Atomic Agents, Microsoft Agent Framework, Magentic, Marvin": "there is no program",
}
"""Framework → why it is not in the matrix."""
