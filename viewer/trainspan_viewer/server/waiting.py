"""Pages that take longer than a browser should wait: it gets a small page at once, and the whole one when that is ready.

The computation continues, and the next request for the same address gets its answer: the small page's script waits for it and
reloads the page; a reader without scripts follows a link. An answer that is not requested is discarded.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from starlette.responses import Response

__all__ = ["Waiting", "Work"]

_MOST: Final = 16
"""Works that are kept; the oldest is forgotten first."""
_WANTED_S: Final = 10.0
"""How long a computation, and then its answer, is kept for a reader who got the waiting page."""


@dataclass(slots=True)
class Work:
    """A page in the making."""

    task: "asyncio.Future[Response]" = field(init=False)
    watchers: int = 0
    until_s: float = 0.0
    """On the monotonic clock: when it is forgotten unless somebody watches."""

    @property
    def is_wanted(self) -> bool:
        """Whether a reader waits for it, or got the waiting page a moment ago."""
        return self.watchers > 0 or time.monotonic() < self.until_s


class Waiting:
    """The works of one server, in its event loop."""

    def __init__(self, page_wait_s: float) -> None:
        self._page_wait_s = page_wait_s
        self._works: dict[str, Work] = {}

    async def navigate(self, address: str, make: Callable[[Work], Awaitable[Response]]) -> Response | None:
        """The page, or None if it is not ready in time; then its computation continues."""
        self._forget()
        work = self._works.get(address)
        if work is None:
            work = Work()
            work.task = asyncio.ensure_future(make(work))
            self._works[address] = work
        done = await self._watched(work, self._page_wait_s)
        if not done:
            return None
        self._works.pop(address, None)
        return work.task.result()

    async def join(self, address: str) -> Response | None:
        """The answer of a page that is being made, which the next navigation gets too; None if none is."""
        self._forget()
        work = self._works.get(address)
        if work is None:
            return None
        if not work.task.done():
            await self._watched(work, None)
        return work.task.result()

    async def _watched(self, work: Work, timeout_s: float | None) -> bool:
        work.watchers += 1
        try:
            done, _ = await asyncio.wait({work.task}, timeout=timeout_s)
        finally:
            work.watchers -= 1
            work.until_s = time.monotonic() + _WANTED_S
        return bool(done)

    def _forget(self) -> None:
        for address in [address for address, work in self._works.items() if not work.is_wanted]:
            del self._works[address]
        while len(self._works) >= _MOST:
            del self._works[next(iter(self._works))]
