"""Suppresses warnings caused only by instrumentation, so that the agent's stderr is the same as without it.

An instrumentor that records an argument as passed by the client's code (openai's `Omit`, a class) triggers a warning
about its type; a framework that enables an instrumentor itself triggers a warning that it is already enabled.
"""

import sys
from logging import LogRecord, getLogger
from typing import Final

__all__ = ["quiet_instrumentors"]

_OF_INSTRUMENTORS: Final = ("opentelemetry.instrumentation.", "openinference.instrumentation.")
_MAX_DEPTH: Final = 32


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
