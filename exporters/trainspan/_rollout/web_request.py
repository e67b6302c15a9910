"""One request of a service as a rollout: a SERVER or CONSUMER span that no other rollout encloses.

The rollout's id is the span's id. It holds in everything that runs in the request's context, threads and background tasks
included; the span becomes the rollout's own if the request asked the policy for anything.
"""

import asyncio

from opentelemetry import baggage, context
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from trainspan._guard import guarded
from trainspan._rollout.boundary import requests_are_rollouts, trusts_baggage
from trainspan._rollout.scope import Scope, process_scope, scope_in, with_scope
from trainspan_schemas import keys
from trainspan_schemas.identity import Identity
from trainspan_schemas.status import RolloutStatus

__all__ = ["RequestRollouts"]

_KINDS = (SpanKind.SERVER, SpanKind.CONSUMER)


class RequestRollouts(SpanProcessor):
    """Begins and ends them with their spans."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Called in the context in which instrumentation enters the span right after."""
        if span.kind in _KINDS:
            _begin(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Called when the request is over, not always in its context."""
        if span.kind in _KINDS:
            _leave(span)


@guarded
def _begin(span: Span, parent_context: Context | None) -> None:
    outer = scope_in(parent_context) or process_scope()
    if not requests_are_rollouts() or (outer is not None and not outer.provisional):
        return
    if outer is not None and outer.span.get_span_context().trace_id == span.get_span_context().trace_id:
        return  # the rollout asks its own process
    trusted = Identity.from_attributes(baggage.get_all(parent_context)) if trusts_baggage() else None
    if trusted is not None:
        scope = Scope(trusted, "runner", span)
    else:
        scope = Scope(Identity(f"{span.get_span_context().span_id:016x}"), "request", span)
    if outer is not None:
        outer.holds_rollouts = True
    span.set_attributes(scope.identity.attributes())
    _tell_at_end(span, scope)
    context.attach(with_scope(scope))


def _tell_at_end(span: Span, scope: Scope) -> None:
    """By the span's own `end`: once a processor hears of it, attributes can no longer be set."""
    end = span.end

    def tell_and_end(end_time: int | None = None) -> None:
        _tell(span, scope)
        end(end_time)

    span.end = tell_and_end  # type: ignore[method-assign]


@guarded
def _tell(span: Span, scope: Scope) -> None:
    if not scope.was_used:
        return
    if scope.boundary == "request":
        failed = span.status.status_code is StatusCode.ERROR
        status: RolloutStatus = "agent_error" if failed else "ok"
        span.set_attributes(scope.outcome(status))
    else:
        span.set_attribute(keys.ROLLOUT_CALLS, scope.calls)


@guarded
def _leave(span: ReadableSpan) -> None:
    """A thread that serves one request after the other must not keep the last one's rollout.

    In asyncio a request has a task of its own, where background work may follow upon the answer.
    """
    scope = None if _in_event_loop() else scope_in(None)
    if scope is not None and scope.span.get_span_context() == span.context:
        context.attach(with_scope(None))


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
