"""A fault of ours never becomes the agent's: it is logged once, counted, and left behind."""

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["faults", "guarded", "logger"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

logger = logging.getLogger("trainspan")

faults: Counter[str] = Counter()
"""Step → how often it failed in this process."""


def guarded(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """The function, returning None where it would raise an `Exception`."""
    step = f"{function.__module__.rpartition('.')[2].lstrip('_')}.{function.__name__.lstrip('_')}"

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            faults[step] += 1
            if faults[step] == 1:
                logger.warning("event=step_failed step=%s error=%r; the agent goes on without it", step, error)
                logger.debug("event=step_failed step=%s", step, exc_info=True)
            return None

    return call
