"""Ids from the operating system's randomness: a program that seeds `random` must not repeat those of other rollouts.

OpenTelemetry's default generator draws from `random`, which programs seed, and whose sequence it changes for them.
"""

import os

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from trainspan._guard import guarded

__all__ = ["SystemIds", "draw_from_system", "new_id"]


def new_id() -> str:
    """Returns 32 hex digits."""
    return os.urandom(16).hex()


def _number(n_bytes: int) -> int:
    return int.from_bytes(os.urandom(n_bytes), "big") or 1


class SystemIds(RandomIdGenerator):
    """Ids are never 0, which is invalid."""

    def generate_span_id(self) -> int:
        return _number(8)

    def generate_trace_id(self) -> int:
        return _number(16)


@guarded
def draw_from_system() -> None:
    """Makes the default generator of every provider draw from the system; a program's own generator stays."""
    RandomIdGenerator.generate_span_id = SystemIds.generate_span_id  # type: ignore[assignment]
    RandomIdGenerator.generate_trace_id = SystemIds.generate_trace_id  # type: ignore[assignment]
