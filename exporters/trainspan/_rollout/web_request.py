"""Makes each request of a service a rollout: a SERVER or CONSUMER span that no other rollout encloses.

The rollout's id applies to everything in the request's context, including threads and background
tasks; the span becomes the rollout's own if the request called the policy.
"""

import asyncio

from opentelemetry import baggage, context
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from trainspan._guard import guarded, refuse
from trainspan._rollout.boundary import requests_are_rollouts, trusts_baggage
from trainspan._rollout.ids import new_id
from trainspan._rollout.scope import Scope, process_scope, scope_in, with_scope
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["RequestRollouts"]

_KINDS = (SpanKind.SERVER, SpanKind.CONSUMER)


class RequestRollouts(SpanProcessor):
    """Starts and ends request rollouts with their spans."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Called in the context in which instrumentation then enters the span."""
        if span.kind in _KINDS:
            _begin(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Called when the request has ended, not always in its context."""
        if span.kind in _KINDS:
            _leave(span)


@guarded
def _begin(span: Span, parent_context: Context | None) -> None:
    outer = scope_in(parent_context) or process_scope()
    if not requests_are_rollouts() or (outer is not None and not outer.provisional):
        return
    if outer is not None and outer.span.get_span_context().trace_id == span.get_span_context().trace_id:
        return  # the rollout calls its own process
    trusted = _trusted(parent_context) if trusts_baggage() else None
    scope = Scope(trusted, "runner", span) if trusted is not None else Scope(Identity(new_id()), "request", span)
    if outer is not None:
        outer.holds_rollouts = True
    span.set_attributes(scope.identity.attributes())
    _report_at_end(span, scope)
    context.attach(with_scope(scope))


def _trusted(parent_context: Context | None) -> Identity | None:
    try:
        return Identity.from_attributes(baggage.get_all(parent_context))
    except InvalidRecordError as error:
        refuse("malformed_identity", f"the baggage of a request is not used: {error}")
        return None


def _report_at_end(span: Span, scope: Scope) -> None:
    """Wraps the span's own `end`: when a processor is notified, attributes can no longer be set."""
    end = span.end

    def report_and_end(end_time: int | None = None) -> None:
        _report(span, scope)
        end(end_time)

    span.end = report_and_end  # type: ignore[method-assign]


@guarded
def _report(span: Span, scope: Scope) -> None:
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
    """Clears the rollout from a thread that serves one request after another.

    In asyncio each request has its own task, where background work may continue after the response.
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
