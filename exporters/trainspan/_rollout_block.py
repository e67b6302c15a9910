"""`trainspan.rollout(...)`: marks one execution of the agent on one task."""

import asyncio
import contextlib
import functools
import inspect
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Literal, TypeVar, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags

from trainspan._calls.http_clients import wrap_clients
from trainspan._guard import guarded, refuse, shown
from trainspan._rollout.ids import SystemIds, draw_from_system, new_id
from trainspan._rollout.reward import evaluate
from trainspan._rollout.scope import Boundary, Scope, current_scope
from trainspan._rollout.span_processor import stamp_spans_of
from trainspan._rollout.suspension import Block, came_at_a_yield, enter, leave
from trainspan._switch import is_disabled
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, Split, TraceParent
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = [
    "Rollout",
    "begin_hosted",
    "end_hosted",
    "end_open_rollouts",
    "end_rollout_span",
    "record_error",
    "rollout",
    "start_span",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_IDS: Final = SystemIds()
_open: Final["weakref.WeakSet[Scope]"] = weakref.WeakSet()


def rollout(
    task_id: object = None,
    *,
    rollout_id: object = None,
    run_id: object = None,
    round: int | None = None,
    split: Split = "train",
    attempt: int | None = None,
) -> "Rollout":
    """Groups the model calls of a block (synchronous or asynchronous) or a decorated function into one rollout.

    It starts a new trace, and its status is `ok`, or `agent_error` if an exception leaves it. If a runner or an outer
    block has already started the rollout, the block joins it and has its id. Without an exporter nothing is sent, but
    the ids are valid. Ids that are not strings, such as numbers or UUIDs, are converted with `str`. Raises ValueError for
    an id, attempt or round that no store can hold.

    Each run of a block with a `rollout_id` of yours is a new attempt of that rollout, of which only the last one is
    trained; `attempt` numbers it instead.

        with trainspan.rollout(task_id="task-1") as r:
            r.reward(score(solve(task)))
    """
    own_id = _text(rollout_id) or ""
    wanted = Identity(own_id, _text(run_id), _text(task_id), attempt or 0, round, split)
    wanted.check()
    return Rollout(wanted, is_again=rollout_id is not None and attempt is None)


def _text(given: object) -> str | None:
    return None if given is None else str(given)


class Rollout:
    """The result of `trainspan.rollout`; ids are available inside the block."""

    def __init__(self, identity: Identity, *, is_again: bool = False) -> None:
        """`is_again`: an earlier run may have had this id, so that this one needs an attempt of its own."""
        self._wanted = identity
        self._is_again = is_again
        self._scope: Scope | None = None
        self._span: Span | None = None
        self._block: Block | None = None
        self._joined = False
        self._goes_on = False
        """Whether the block is left for a while only."""
        self._pid = 0

    @property
    def id(self) -> str:
        """`trainspan.rollout.id`. Raises RuntimeError outside the block."""
        return self._entered().identity.rollout_id

    @property
    def url_token(self) -> str:
        """Names the rollout in a base URL `…/rollout/{url_token}/v1` or an API key `trainspan-{url_token}`.

        It is the traceparent, followed by the runner's signature inside a runner's rollout.
        """
        signature = self._entered().identity.url_signature
        return f"{self.traceparent}.{signature}" if signature else self.traceparent

    @property
    def traceparent(self) -> str:
        """W3C `traceparent` of the block, for another process."""
        self._entered()
        assert self._span is not None
        ctx = self._span.get_span_context()
        return str(TraceParent(f"{ctx.trace_id:032x}", f"{ctx.span_id:016x}", ctx.trace_flags.sampled))

    def reward(
        self,
        value: float,
        name: str = keys.REWARD,
        explanation: str | None = None,
        *,
        of: Literal["rollout", "call"] = "rollout",
    ) -> None:
        """Like `trainspan.reward`, for this rollout; also works after the block has ended."""
        evaluate(value, name, explanation, of, self._entered())

    def __enter__(self) -> "Rollout":
        if self._block is not None:
            raise RuntimeError("this rollout block is already entered; call trainspan.rollout(...) for another")
        if self._goes_on and self._span is not None:
            self._goes_on, self._block = False, enter(self._entered(), self._span)
            return self
        self._pid = os.getpid()
        outer = current_scope()
        self._joined = outer is not None and not outer.provisional and not outer.ended
        if outer is not None and self._joined:
            self._span = start_span("trainspan.block", None)
            self._scope = outer
            self._block = enter(outer, self._span)
        else:
            if outer is not None:
                outer.holds_rollouts = True
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._block is None:
            return
        leave(self._block)
        self._block = None
        if not self._goes_on:
            self._end(_status_of(error), error)

    async def __aenter__(self) -> "Rollout":
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __call__(self, function: _F) -> _F:
        """Makes each call of the decorated function a separate rollout.

        A coroutine, a generator or a future of asyncio that a plain function returns belongs to it, to its end.
        """

        def begin() -> Rollout:
            return Rollout(self._wanted, is_again=self._is_again)

        for is_function, _, around in _KINDS:
            if is_function(function):
                return cast("_F", functools.wraps(function)(around(function, begin)))

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with begin() as block:
                return block._kept_open(function(*args, **kwargs), function)

        return cast("_F", run)

    def _kept_open(self, result: Any, function: Callable[..., Any]) -> Any:
        """Returns what `function` has returned; if that has only begun, the block goes on in it."""
        for _, is_begun, around in _KINDS:
            if is_begun(result):
                self._goes_on = True
                return functools.wraps(function)(around(lambda: result, lambda: self))()
        if asyncio.isfuture(result):
            self._goes_on = True
            result.add_done_callback(self._end_with)
        return result

    def _end_with(self, future: Any) -> None:
        error = (
            asyncio.CancelledError() if future.cancelled() else future._exception
        )  # asked, it would count as handled
        self._end(_status_of(error), error)

    def _entered(self) -> Scope:
        if self._scope is None:
            raise RuntimeError("this rollout has not begun: use it as `with trainspan.rollout(...) as r:`")
        return self._scope

    def _begin(self) -> None:
        wanted = self._wanted
        identity = Identity(
            wanted.rollout_id or new_id(),
            wanted.run_id,
            wanted.task_id,
            _attempts.next(wanted.rollout_id) if self._is_again else wanted.attempt,
            wanted.round,
            wanted.split,
        )
        _serve_programs_started_otherwise()
        self._span = start_span(keys.ROLLOUT_SPAN_NAME, Context(), identity, _link_to_enclosing())
        self._scope = Scope(identity, "explicit", self._span)
        self._block = enter(self._scope, self._span)
        _open.add(self._scope)

    @guarded
    def _end(self, status: RolloutStatus, error: BaseException | None) -> None:
        assert self._span is not None
        assert self._scope is not None
        if self._pid != os.getpid():
            return  # a forked child left its parent's block
        if self._joined:
            if error is not None:
                self._span.set_status(Status(StatusCode.ERROR, shown(error)))
            self._span.end()
        elif not self._scope.ended:
            end_rollout_span(self._scope, status, error)


def _coroutine_around(function: Callable[..., Any], begin: Callable[[], Rollout]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        async with begin():
            return await function(*args, **kwargs)

    return run


def _steps_around(function: Callable[..., Any], begin: Callable[[], Rollout]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with begin():
            return (yield from function(*args, **kwargs))

    return run


def _async_steps_around(function: Callable[..., Any], begin: Callable[[], Rollout]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        async with begin(), contextlib.aclosing(function(*args, **kwargs)) as steps:
            step = steps.asend(None)
            while True:
                try:
                    value = await step
                except StopAsyncIteration:
                    return
                try:
                    received = yield value
                except (GeneratorExit, asyncio.CancelledError):  # it is closed, or its closing is canceled
                    raise
                except BaseException as error:
                    step = steps.athrow(error)
                else:
                    step = steps.asend(received)

    return run


_KINDS: Final = (
    (inspect.iscoroutinefunction, inspect.iscoroutine, _coroutine_around),
    (inspect.isgeneratorfunction, inspect.isgenerator, _steps_around),
    (inspect.isasyncgenfunction, inspect.isasyncgen, _async_steps_around),
)
"""Whether a function is of a kind whose calls only begin it, whether an object is such a call, and what puts it into a block."""


class _Attempts:
    """Numbers of the runs of rollouts whose ids the program chose, each above those of earlier runs."""

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._latest: dict[str, int] = {}
        self.unlock()

    def unlock(self) -> None:
        """Also for a forked child: another thread may have held the lock."""
        self._lock = threading.Lock()

    def next(self, rollout_id: str) -> int:
        """The time in seconds; one more than the last run's if this process ran the same rollout within that second."""
        with self._lock:
            number = max(int(time.time()), self._latest.pop(rollout_id, 0) + 1)
            self._latest[rollout_id] = number
            if len(self._latest) > self._most:
                del self._latest[next(iter(self._latest))]
        return number


_attempts: Final = _Attempts()
os.register_at_fork(after_in_child=_attempts.unlock)


def begin_hosted(boundary: Boundary, task_id: str | None = None) -> Scope | None:
    """Starts a rollout around code that a host calls, such as a test of pytest or a job of a worker.

    Returns None if a runner, an explicit block or another host has already started one. The host enters the scope, and
    ends it with `end_hosted`.
    """
    outer = current_scope()
    if outer is not None and not outer.ended and not (outer.provisional and outer.boundary != "request"):
        return None
    if outer is not None:
        outer.holds_rollouts = True
    identity = Identity(new_id(), task_id=task_id)
    scope = Scope(identity, boundary, start_span(keys.ROLLOUT_SPAN_NAME, Context(), identity, _link_to_enclosing()))
    _open.add(scope)
    return scope


def end_hosted(scope: Scope, status: RolloutStatus, error: BaseException | None = None) -> None:
    """Ends a host's rollout; one without policy requests and rewards is not reported."""
    _open.discard(scope)
    scope.status = status
    if scope.was_used and scope.began_here:
        end_rollout_span(scope, status, error)


def start_span(
    name: str, ctx: Context | None, identity: Identity | None = None, links: list[Link] | None = None
) -> Span:
    """Starts a span that has valid ids even if no SDK is set up (it is then not recorded)."""
    attributes = identity.attributes() if identity else None
    span: Span | None = None
    if not is_disabled():
        span = _start(name, ctx, attributes, links)
    if span is None or not span.get_span_context().is_valid:
        parent = trace.get_current_span(ctx).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else _IDS.generate_trace_id()
        span = NonRecordingSpan(SpanContext(trace_id, _IDS.generate_span_id(), False, TraceFlags(TraceFlags.SAMPLED)))
    return span


@guarded
def _start(name: str, ctx: Context | None, attributes: dict[str, str | int] | None, links: list[Link] | None) -> Span:
    tracer = trace.get_tracer("trainspan")
    if hasattr(tracer, "id_generator"):
        cast(
            "Any", tracer
        ).id_generator = _IDS  # of this tracer alone: the program's generator may draw from what it seeds
    span = tracer.start_span(name, ctx, attributes=attributes, links=links)
    started = span.get_span_context()
    if started.is_valid and not started.trace_flags.sampled:
        refuse(
            "not_sampled",
            f"the sampler of this program's tracer (OTEL_TRACES_SAMPLER={os.environ.get('OTEL_TRACES_SAMPLER', '')}) drops "
            "the span of a rollout, which then stays unfinished and is not trained: sample all traces",
        )
    return span


@guarded
def end_rollout_span(scope: Scope, status: RolloutStatus, error: BaseException | None = None) -> None:
    """Ends the rollout's own span with its outcome."""
    _open.discard(scope)
    scope.status = status
    span = scope.span
    try:
        span.set_attributes(scope.outcome(status))
        if error is not None:
            record_error(span, error)
        if status != "ok":
            span.set_status(Status(StatusCode.ERROR, shown(error) if error is not None else status))
    finally:
        span.end()


@guarded
def record_error(span: Span, error: BaseException) -> None:
    """Adds an agent's exception to a span, also one that has no text because its own `__str__` fails."""
    try:
        span.record_exception(error)
    except Exception:
        kind = type(error)
        attributes = {
            "exception.type": kind.__qualname__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__qualname__}",
            "exception.message": shown(error),
            "exception.stacktrace": "".join(traceback.format_exception(error)),
        }
        span.add_event("exception", attributes)


def _link_to_enclosing() -> list[Link]:
    enclosing = trace.get_current_span().get_span_context()
    return [Link(enclosing)] if enclosing.is_valid else []


def end_open_rollouts(status: RolloutStatus) -> int:
    """Ends all unfinished blocks, tests and jobs that this process began; returns their number."""
    scopes = [scope for scope in _open if scope.began_here]
    for scope in scopes:
        if scope.boundary == "request":
            end_hosted(scope, status)
        else:
            end_rollout_span(scope, status)
    return len(scopes)


def _status_of(error: BaseException | None) -> RolloutStatus:
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)) or isinstance(error, GeneratorExit):
        return "ok"
    if isinstance(error, asyncio.CancelledError) and came_at_a_yield(error):
        return "ok"  # the consumer left the generator, and the loop ended before it was closed
    if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
        return "cancelled"
    return "agent_error"


def _serve_programs_started_otherwise() -> None:
    """Adds identity to spans and requests from the first rollout on, if the program sets up the SDK itself."""
    draw_from_system()
    if not is_disabled() and stamp_spans_of(trace.get_tracer_provider()):
        wrap_clients()
