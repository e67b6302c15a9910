"""Contains our own failures, so that they never reach the agent: each is logged once and counted. Hides our frames."""

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

__all__ = ["Args", "Kwargs", "faults", "guarded", "hidden", "logger", "refuse", "shown"]

Args: TypeAlias = tuple[Any, ...]
"""The arguments by position of a function that is wrapped, as wrapt hands them to the wrapper."""
Kwargs: TypeAlias = dict[str, Any]
"""Those by name."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

logger = logging.getLogger("trainspan")

faults: Counter[str] = Counter()
"""Step that failed, or name of what was refused → how often in this process."""


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
                logger.warning("event=step_failed step=%s error=%s; the agent continues without it", step, shown(error))
                logger.debug("event=step_failed step=%s", step, exc_info=True)
            return None

    return call


def refuse(name: str, what: str) -> None:
    """Counts what we will not guess, and logs it once."""
    faults[name] += 1
    if faults[name] == 1:
        logger.warning("event=%s; %s", name, what)


def shown(value: object) -> str:
    """Returns the `repr` of an agent's object, or its type if that fails."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


class _Hidden:
    """Removes our frames from the beginning of the traceback of an exception that leaves the block.

    The block is the call of the wrapped function in a wrapper: the agent's tracebacks are those of a run without us.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            return
        entry = error.__traceback__
        while entry is not None and str(entry.tb_frame.f_globals.get("__name__")).startswith("trainspan."):
            entry = entry.tb_next
        error.__traceback__ = entry


hidden: Final = _Hidden()
