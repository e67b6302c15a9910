"""Finds the name of the agent that makes a model call, from the state of its framework at the time of the call.

Every source is read in the context of the request, with or without an instrumentor for the framework.
A framework that is not imported costs one dictionary lookup.
"""

import sys
from collections.abc import Callable
from contextvars import Token
from functools import partial
from typing import Any, Final

import wrapt
from opentelemetry import trace

from trainspan._calls.agent_on_stack import agent_on_stack
from trainspan._guard import Args, Kwargs, guarded
from trainspan._rollout.span_processor import invoked_agent
from trainspan_schemas.agents.unnamed_agents import agent_of_body

__all__ = ["calling_agent", "watch_frameworks"]

_MAX_DEPTH: Final = 64
_CREATE_AGENT_NODES: Final = frozenset({"agent", "model", "tools"})
"""Nodes inside an agent built by LangChain; as an agent's name they are too generic to use."""


def calling_agent(body: Callable[[], bytes | None]) -> str | None:
    """Returns the name of the agent that requests a generation here; `body` returns the request's JSON if it is needed.

    OpenAI Agents SDK: its current agent span. LangChain and LangGraph: the agent's name, otherwise the graph node.
    Pydantic AI: the agent of the current run. Others: the agent on the call stack, or the nearest agent span. If none of these
    gives a name: a hash of system prompt and tools, which distinguishes the agents of one program, otherwise `service.name`.
    """
    sources = (
        _openai_agent,
        _langgraph_agent,
        _pydantic_agent,
        agent_on_stack,
        invoked_agent,
        partial(_hashed, body),
        _service_name,
    )
    return next(filter(None, (source() for source in sources)), None)


@guarded
def _openai_agent() -> str | None:
    """Reads the SDK's own context, which exists even if its tracing is disabled."""
    module = sys.modules.get("agents.tracing.scope")
    if module is None:
        return None
    span = module.Scope.get_current_span()
    for _ in range(_MAX_DEPTH):
        if span is None or span is Token.MISSING:
            return None
        if span.span_data.type == "agent":
            return str(span.span_data.name)
        entered = span._prev_span_token
        span = entered.old_value if entered is not None else None
    return None


@guarded
def _langgraph_agent() -> str | None:
    module = sys.modules.get("langchain_core.runnables.config")
    config = module.var_child_runnable_config.get() if module else None
    metadata = (config or {}).get("metadata") or {}
    if name := metadata.get("lc_agent_name"):
        return str(name)
    nodes = [part.partition(":")[0] for part in str(metadata.get("langgraph_checkpoint_ns") or "").split("|")]
    agent_nodes = [node for node in nodes if node and node not in _CREATE_AGENT_NODES]
    return agent_nodes[-1] if agent_nodes else None


@guarded
def _pydantic_agent() -> str | None:
    module = sys.modules.get("pydantic_ai._run_context")
    read = getattr(module, "get_current_run_context", None)
    run = read() if read else None
    agent = getattr(run, "agent", None)
    return str(agent.name) if agent is not None and agent.name else None


@guarded
def _hashed(body: Callable[[], bytes | None]) -> str | None:
    return agent_of_body(body())


@guarded
def _service_name() -> str | None:
    resource = getattr(trace.get_tracer_provider(), "resource", None)
    name = str(resource.attributes.get("service.name") or "") if resource else ""
    return None if name.startswith("unknown_service") else name or None


def watch_frameworks() -> None:
    """Keeps the OpenAI Agents SDK from sending its own traces to OpenAI with the policy's API key."""
    wrapt.register_post_import_hook(guarded(_stop_uploads), "agents.tracing.processors")


def _stop_uploads(module: Any) -> None:
    def export(wrapped: Callable[..., Any], exporter: Any, args: Args, kwargs: Kwargs) -> Any:
        """Exports only items with an explicitly given key, not those that would use OPENAI_API_KEY."""
        items = args[0] if args else kwargs.pop("items", [])
        if not _has_key(exporter):
            items = [item for item in items if getattr(item, "tracing_api_key", None)]
        return wrapped(items, *args[1:], **kwargs) if items else None

    for name in ("export", "_export_with_deadline"):
        if hasattr(module.BackendSpanExporter, name):
            wrapt.wrap_function_wrapper(module.BackendSpanExporter, name, export)


def _has_key(exporter: Any) -> bool:
    return bool(getattr(exporter, "_api_key", None))
