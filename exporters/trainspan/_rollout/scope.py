"""The rollout that code runs in: who it is, its span, and what its process has seen of it.

The scope travels in OpenTelemetry's context under a key of our own. It never enters OpenTelemetry's baggage, which
instrumentation sends to every host.
"""

import threading
from typing import Final, Literal, cast

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags

from trainspan_schemas import keys
from trainspan_schemas.identity import Identity, TraceParent
from trainspan_schemas.status import RolloutStatus
from trainspan_schemas.worker import AgentReport

__all__ = [
    "Boundary",
    "Scope",
    "current_scope",
    "process_scope",
    "remote_span",
    "scope_in",
    "set_process_scope",
    "with_scope",
]

Boundary = Literal["runner", "explicit", "request", "process"]
"""Who began the rollout: a runner or another process above this one, an explicit block, a request, or this process."""

_KEY: Final = context.create_key("trainspan-scope")


class Scope:
    """One rollout as seen from this process. Counters may be touched from any thread.

    `provisional`: nobody asked for this rollout; a request or an explicit block inside of it begins one of its own.
    """

    def __init__(self, identity: Identity, boundary: Boundary, span: Span, *, provisional: bool | None = None) -> None:
        self.identity = identity
        self.boundary: Boundary = boundary
        self.provisional = boundary in ("process", "request") if provisional is None else provisional
        self.span = span
        self.holds_rollouts = False
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Counts from nothing, as in a forked child."""
        self._lock = threading.Lock()
        self.calls = 0
        self._recorded = 0
        self.policy_failing = False
        self.rewards: list[float] = []

    def count(self, succeeded: bool | None) -> None:
        """Notes a generation request: True answered, False failed for want of a working server, None refused."""
        with self._lock:
            self.calls += succeeded is True
            self.policy_failing = succeeded is False

    def next_call_index(self) -> int:
        """Numbers the calls that this process records by itself, from 0."""
        with self._lock:
            self._recorded += 1
            return self._recorded - 1

    @property
    def superseded(self) -> bool:
        """Whether explicit blocks took this process's rollouts over: it made no call outside of them."""
        return self.holds_rollouts and not self.calls

    @property
    def was_used(self) -> bool:
        """Whether the policy was asked for anything, or a reward given."""
        return bool(self.calls or self.policy_failing or self.rewards)

    def report(self) -> AgentReport:
        """What the runner wants to know."""
        with self._lock:
            return AgentReport(self.calls, self.policy_failing, list(self.rewards))

    def outcome(self, status: RolloutStatus) -> dict[str, str | int]:
        """The attributes that make a span the rollout's own."""
        return {
            keys.ROLLOUT_STATUS: status,
            keys.ROLLOUT_BOUNDARY: self.boundary,
            keys.ROLLOUT_CALLS: self.calls,
        }

    def enter(self, base: Context | None = None) -> Context:
        """`base` (default: the current context) with this scope and its span as the current ones."""
        return trace.set_span_in_context(self.span, with_scope(self, base))


def with_scope(scope: Scope | None, base: Context | None = None) -> Context:
    """`base` (default: the current context) with `scope`, and the current span as it is."""
    return context.set_value(_KEY, scope, base)


class _Process:
    scope: Scope | None = None


def process_scope() -> Scope | None:
    """The scope that holds where no context says otherwise, as in a thread that lost it."""
    return _Process.scope


def set_process_scope(scope: Scope | None) -> None:
    """Sets the scope of the whole process."""
    _Process.scope = scope


def scope_in(ctx: Context | None) -> Scope | None:
    """The scope in `ctx` (default: the current context), without the fallback."""
    return cast("Scope | None", context.get_value(_KEY, ctx))


def current_scope() -> Scope | None:
    """The scope of the running code."""
    return scope_in(None) or _Process.scope


def remote_span(parent: TraceParent) -> Span:
    """A span of another process, to be a parent here."""
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    return NonRecordingSpan(SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags))
