"""Contains our own failures, so that they never reach the agent: each is logged once and counted."""

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
"""Step → number of failures in this process."""


def guarded(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Wraps a function to return None if it raises an `Exception`."""
    step = f"{function.__module__.rpartition('.')[2].lstrip('_')}.{function.__name__.lstrip('_')}"

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            faults[step] += 1
            if faults[step] == 1:
                logger.warning("event=step_failed step=%s error=%r; the agent continues without it", step, error)
                logger.debug("event=step_failed step=%s", step, exc_info=True)
            return None

    return call
