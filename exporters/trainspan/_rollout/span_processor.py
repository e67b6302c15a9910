"""A span processor that writes the rollout's identity on every span and remembers each span's local parent."""

import re
import weakref
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from trainspan._guard import guarded, refuse
from trainspan._rollout.last_call import last_call
from trainspan._rollout.scope import process_scope, scope_in
from trainspan._rollout.web_request import RequestRollouts
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity

__all__ = ["add_processor", "invoked_agent", "outlive_shutdown", "stamp_spans_of"]

_MAX_DEPTH = 64

_METHOD = re.compile(r"\.[a-z_]+$")
"""Suffix that OpenInference's instrumentors append to an agent's name: `planner.run`, `planner.on_messages_stream`."""

_parents: "weakref.WeakKeyDictionary[Span, Span]" = weakref.WeakKeyDictionary()
"""Span → its parent, while the span is in use."""


def outlive_shutdown(provider: Any) -> None:
    """Notes, on the provider, that its exports go on after its shutdown; logfire's cannot be a member of a set."""
    provider._trainspan_outlives = True


class IdentityStamp(SpanProcessor):
    """Sets the identity from the context, or the parent span, or the process (in a thread that lost its context).

    It also names the model call that came back last before the span, and warns of a rollout that a shutdown of the provider loses.
    """

    def __init__(self, provider: object) -> None:
        self._provider = provider
        self._is_shut_down = False

    def shutdown(self) -> None:
        """Called when the program shuts the provider down, possibly in the middle of a rollout."""
        self._is_shut_down = True

    def on_end(self, span: ReadableSpan) -> None:
        """Called in the thread that ends the span."""
        if (
            self._is_shut_down
            and span.name == keys.ROLLOUT_SPAN_NAME
            and not getattr(self._provider, "_trainspan_outlives", False)
        ):
            task = (span.attributes or {}).get(keys.TASK_ID)
            refuse(
                "tracing_was_shut_down",
                f"the program shut its tracer provider down before the rollout{f' of task {task!r}' if task else ''} ended, whose "
                "span is lost and which is not trained: call force_flush() there, and shutdown() after the last rollout",
            )

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Called in the thread that starts the span."""
        self._stamp(span, parent_context)

    @staticmethod
    @guarded
    def _stamp(span: Span, parent_context: Context | None) -> None:
        parent = trace.get_current_span(parent_context)
        if isinstance(parent, Span):
            _parents[span] = parent
        scope = scope_in(parent_context)
        is_named = bool(span.attributes and keys.ROLLOUT_ID in span.attributes)
        within = scope or (None if is_named else process_scope())
        call = last_call(within.beginning, parent_context) if within else None
        attributes: dict[str, str | int] = {keys.LAST_CALL: call} if call else {}
        if not is_named:
            identity = scope.identity if scope else _identity_of(parent)
            if identity is None and (fallback := process_scope()):
                identity = fallback.identity
            if identity:
                attributes |= identity.attributes()
        span.set_attributes(attributes)


def _identity_of(span: trace.Span) -> Identity | None:
    if not isinstance(span, ReadableSpan) or not span.attributes:
        return None
    return Identity.from_attributes(span.attributes)


def invoked_agent(span: trace.Span | None = None) -> str | None:
    """Returns the name of the agent with the innermost span around `span` (default: the current span)."""
    current: Any = trace.get_current_span() if span is None else span
    for _ in range(_MAX_DEPTH):
        if not isinstance(current, Span):
            return None
        if name := _agent_of(current):
            return name
        current = _parents.get(current)
    return None


def _agent_of(span: Span) -> str | None:
    """Returns the agent named on an agent span of the standard conventions, OpenInference or traceloop."""
    attributes = span.attributes or {}
    name: object = None
    if attributes.get(keys.GEN_AI_OPERATION) == keys.OPERATION_INVOKE_AGENT:
        name = attributes.get(keys.GEN_AI_AGENT_NAME)
    elif attributes.get("openinference.span.kind") == "AGENT":
        name = attributes.get("agent.name") or _METHOD.sub("", span.name)
    elif attributes.get("traceloop.span.kind") == "agent":
        name = attributes.get("traceloop.entity.name")
    return str(name) if name else None


@guarded
def stamp_spans_of(provider: object) -> bool:
    """Adds the processors to an SDK tracer provider, once; returns False if it is not an SDK provider."""
    if getattr(provider, "_trainspan_stamped", False):
        return True
    if not add_processor(provider, RequestRollouts()):
        return False
    provider._trainspan_stamped = True  # type: ignore[attr-defined]
    return add_processor(provider, IdentityStamp(provider))


def add_processor(provider: object, processor: SpanProcessor) -> bool:
    """Adds one processor to those that an SDK tracer provider has; returns False if it is not an SDK provider.

    Not by the provider's own method if there is another way: at the first call, Phoenix's drops its own exporter.
    """
    add = getattr(getattr(provider, "_active_span_processor", provider), "add_span_processor", None)
    if add is None:
        return False
    add(processor)
    return True
