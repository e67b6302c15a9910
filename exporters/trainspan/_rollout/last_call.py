"""Which model call came back last, as seen from the running code.

Times cannot tell it: the policy server has a clock of its own. The server names each call in its response, and code that runs
afterwards in the same context, or waits for a task or thread that was started there, comes after that call. Of tasks that run
side by side, each has its own last call.
"""

import re
import weakref
from typing import Final

from opentelemetry import context

__all__ = ["ReturnedCall", "came_back", "last_call"]

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
        above: list[weakref.ref[ReturnedCall]] = [] if before is None else [*before._above, weakref.ref(before)]
        # One that no context holds any more is asked for no longer.
        self._above: list[weakref.ref[ReturnedCall]] = [one for one in above if one() is not None]
        for one in self._above:
            if (earlier := one()) is not None:
                earlier.latest = call

    @property
    def first(self) -> "ReturnedCall":
        """The beginning of its rollout, which the rollout's scope holds."""
        return (self._above[0]() if self._above else None) or self


def came_back(rollout: ReturnedCall, call: str | None) -> None:
    """Notes in the running code's context that `call` was answered; `rollout` is the beginning of its rollout."""
    named = call if call and _SPAN_ID.fullmatch(call) else None
    context.attach(context.set_value(_KEY, ReturnedCall(named, _current(rollout))))


def last_call(rollout: ReturnedCall, ctx: context.Context | None = None) -> str | None:
    """The call of the rollout that came back last before the code in `ctx` (default: the running code), if it is known."""
    return _current(rollout, ctx).latest


def _current(rollout: ReturnedCall, ctx: context.Context | None = None) -> ReturnedCall:
    found = context.get_value(_KEY, ctx)
    return found if isinstance(found, ReturnedCall) and found.first is rollout else rollout
