"""Keeps instrumentors from being noticed: their warnings, and the time that loading them takes.

An instrumentor that records an argument as passed by the client's code (openai's `Omit`, a class) triggers a warning
about its type; a framework that enables an instrumentor itself triggers a warning that it is already enabled; modules
that an instrumentor imports may warn, which is an error if the program says so. The instrumentors of openai import all of
openai, which takes longer than the rest of the startup, also in programs that never use it.
"""

import sys
import warnings
from collections.abc import Callable
from logging import LogRecord, getLogger
from types import ModuleType
from typing import Any, Final

import wrapt
from opentelemetry.instrumentation import distro

from trainspan._guard import Args, Kwargs, guarded

__all__ = ["defer_instrumentors", "quiet_instrumentors"]

_DEFERRED: Final = {
    "opentelemetry.instrumentation.openai": "openai",
    "openinference.instrumentation.openai": "openai",
}
"""Module of an instrumentor → the one library that it patches. Those of other libraries are not here: some patch several
libraries, whose imports may be half done at that moment."""

_OF_INSTRUMENTORS: Final = ("opentelemetry.instrumentation.", "openinference.instrumentation.")
_MAX_DEPTH: Final = 32


def defer_instrumentors() -> None:
    """Loads these instrumentors when the program imports their library, unless it already has."""
    wrapt.wrap_function_wrapper(distro, "BaseDistro.load_instrumentor", _load)


def _load(wrapped: Callable[..., Any], _distro: Any, args: Args, kwargs: Kwargs) -> Any:
    entry_point = args[0] if args else kwargs["entry_point"]
    if not _defer(entry_point.module, entry_point.attr, lambda: wrapped(*args, **kwargs)):
        return wrapped(*args, **kwargs)
    return None


@guarded
def _defer(module: str, name: str, load: Callable[[], object]) -> bool:
    """Whether the instrumentor `name` of `module` will be loaded with its library."""
    library = _DEFERRED.get(module)
    if library is None or library in sys.modules:
        return False
    loaded: list[bool] = []

    @guarded
    def load_instrumentor(_: ModuleType) -> None:
        if not loaded and (module not in sys.modules or hasattr(sys.modules[module], name)):
            loaded.append(True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load()

    # If a program imports the instrumentor itself, the library is imported in the middle of that: only then it lacks the name.
    for imported in (library, module):
        wrapt.register_post_import_hook(load_instrumentor, imported)
    return True


def quiet_instrumentors() -> None:
    """Drops these warnings; the same warnings from the agent's own code remain."""
    getLogger("opentelemetry.attributes").addFilter(_is_of_agent)
    getLogger("opentelemetry.instrumentation.instrumentor").addFilter(_is_no_second_start)


def _is_of_agent(record: LogRecord) -> bool:
    return not (str(record.msg).startswith("Invalid type") and _is_called_by_instrumentor())


def _is_called_by_instrumentor() -> bool:
    frame = sys._getframe(2)
    for _ in range(_MAX_DEPTH):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__")).startswith(_OF_INSTRUMENTORS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_no_second_start(record: LogRecord) -> bool:
    return str(record.msg) != "Attempting to instrument while already instrumented"
