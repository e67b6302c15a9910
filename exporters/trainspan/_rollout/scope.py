"""The current rollout: its identity, its span, and its counts in this process.

The scope is stored in OpenTelemetry's context under our own key. It is never put into OpenTelemetry's baggage, which
instrumentation sends to every host.
"""

import os
import threading
from typing import Final, Literal, cast

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags

from trainspan._rollout.last_call import ReturnedCall
from trainspan_schemas.agents.worker import AgentReport
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_schemas.telemetry.status import RolloutStatus

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
"""The initiator of the rollout: a runner or another parent process, an explicit block, a request or job, or this process."""

_KEY: Final = context.create_key("trainspan-scope")


class Scope:
    """One rollout as seen from this process. Counters may be updated from any thread.

    `provisional`: the rollout is only a default; a request or an explicit block inside it starts a separate rollout.
    `ended`: no block joins it any more; calls of tasks and threads that it started still belong to it.
    """

    def __init__(self, identity: Identity, boundary: Boundary, span: Span, *, provisional: bool | None = None) -> None:
        self.identity = identity
        self.boundary: Boundary = boundary
        self.provisional = boundary in ("process", "request") if provisional is None else provisional
        self.span = span
        self.holds_rollouts = False
        self.status: RolloutStatus | None = None
        """How it ended; None while it runs."""
        self.beginning = ReturnedCall()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Resets the counters, for example in a forked child."""
        self._lock = threading.Lock()
        self.calls = 0
        self._recorded = 0
        self.policy_failing = False
        self.rewards: list[float] = []

    def count(self, succeeded: bool | None) -> None:
        """Counts a generation request: True if answered, False if the server failed, None if refused."""
        with self._lock:
            self.calls += succeeded is True
            self.policy_failing = succeeded is False

    def next_call_index(self) -> int:
        """Returns the next number, from 0, for a call recorded by this process."""
        with self._lock:
            self._recorded += 1
            return self._recorded - 1

    @property
    def began_here(self) -> bool:
        """Whether this process began it; a forked child leaves its end to the parent."""
        return self._pid == os.getpid()

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def superseded(self) -> bool:
        """Whether inner rollouts replace this one: it contains others and has no calls outside them."""
        return self.holds_rollouts and not self.calls

    @property
    def was_used(self) -> bool:
        """Whether it made a policy request or got a reward."""
        return bool(self.calls or self.policy_failing or self.rewards)

    def report(self) -> AgentReport:
        """Returns the report for the runner."""
        with self._lock:
            return AgentReport(self.calls, self.policy_failing, list(self.rewards))

    def outcome(self, status: RolloutStatus) -> dict[str, str | int]:
        """Returns the attributes that mark a span as the rollout's own."""
        return {
            keys.ROLLOUT_STATUS: status,
            keys.ROLLOUT_BOUNDARY: self.boundary,
            keys.ROLLOUT_CALLS: self.calls,
        }

    def enter(self, base: Context | None = None) -> Context:
        """Returns `base` (default: the current context) with this scope and its span as the current ones."""
        return trace.set_span_in_context(self.span, with_scope(self, base))


def with_scope(scope: Scope | None, base: Context | None = None) -> Context:
    """Returns `base` (default: the current context) with `scope` and an unchanged current span."""
    return context.set_value(_KEY, scope, base)


class _Process:
    scope: Scope | None = None


def process_scope() -> Scope | None:
    """Returns the fallback scope for code without one in its context, such as a thread that lost it."""
    return _Process.scope


def set_process_scope(scope: Scope | None) -> None:
    """Sets the scope of the whole process."""
    _Process.scope = scope


def scope_in(ctx: Context | None) -> Scope | None:
    """Returns the scope in `ctx` (default: the current context), without the fallback."""
    return cast("Scope | None", context.get_value(_KEY, ctx))


def current_scope() -> Scope | None:
    """Returns the scope of the running code."""
    return scope_in(None) or _Process.scope


def remote_span(parent: TraceParent) -> Span:
    """Returns a span of another process for use as a parent here."""
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    return NonRecordingSpan(SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags))
