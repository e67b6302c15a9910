"""Which model call came back last, as seen from the running code.

Times cannot tell it: the policy server has a clock of its own. The server names each call in its response, and code that runs
afterwards in the same context, or waits for a task or thread that was started there, comes after that call. Of tasks that run
side by side, each has its own last call.

OpenTelemetry's context alone cannot tell it either: what is attached while a span is current, as during each call of an
instrumented client, is gone with the span. So the call is also noted in a variable of Python's context.
"""

import contextlib
import re
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from opentelemetry import context

__all__ = ["ReturnedCall", "came_back", "last_call", "note", "noted", "noting"]

_KEY: Final = context.create_key("trainspan-last-call")
_SPAN_ID: Final = re.compile("[0-9a-f]{16}")


class ReturnedCall:
    """A call of a rollout that came back in some context, and the latest one in the contexts that were derived from it since.

    A rollout begins with one without a call.
    """

    __slots__ = ("__weakref__", "_above", "latest")

    def __init__(self, call: str | None = None, before: "ReturnedCall | None" = None) -> None:
        self.latest = call
        """16 hex digits; None: no call, or one of a server that does not name its calls."""
        self._above: list[weakref.ref[ReturnedCall]] = []
        """Its predecessors, from the beginning on. One that no context holds any more is asked for no longer."""
        if before is not None:
            for reference in (*before._above, weakref.ref(before)):
                if (earlier := reference()) is not None:
                    earlier.latest = call
                    self._above.append(reference)

    @property
    def first(self) -> "ReturnedCall":
        """The beginning of its rollout, which the rollout's scope holds."""
        return (self._above[0]() if self._above else None) or self

    def comes_after(self, other: "ReturnedCall") -> bool:
        """Whether this call was made in a context in which `other` had come back."""
        return any(reference() is other for reference in self._above)


_noted: Final["ContextVar[ReturnedCall | None]"] = ContextVar("trainspan-last-call", default=None)


def came_back(rollout: ReturnedCall, call: str | None) -> None:
    """Notes in the running code's context that `call` was answered; `rollout` is the beginning of its rollout."""
    span_id = call if call and _SPAN_ID.fullmatch(call) else None
    returned = ReturnedCall(span_id, _current(rollout))
    _noted.set(returned)
    context.attach(context.set_value(_KEY, returned))


def last_call(rollout: ReturnedCall, ctx: context.Context | None = None) -> str | None:
    """The call of the rollout that came back last before the code in `ctx` (default: the running code), if it is known."""
    return _current(rollout, ctx).latest


def noted() -> ReturnedCall | None:
    """What the running code carries to the threads that it starts, beside OpenTelemetry's context."""
    return _noted.get()


def note(carried: ReturnedCall | None) -> None:
    """Notes in a thread what the code that started it carried."""
    _noted.set(carried)


@contextlib.contextmanager
def noting(carried: ReturnedCall | None) -> Iterator[None]:
    """Notes what a job of a pool carries while it runs; it does not come after the calls of its thread's other jobs."""
    token = _noted.set(carried)
    try:
        yield
    finally:
        _noted.reset(token)


def _current(rollout: ReturnedCall, ctx: context.Context | None = None) -> ReturnedCall:
    attached, latest = context.get_value(_KEY, ctx), _noted.get()
    if not isinstance(attached, ReturnedCall) or attached.first is not rollout:
        attached = rollout
    if latest is None or latest is attached:
        return attached
    return latest if latest.comes_after(attached) else attached
