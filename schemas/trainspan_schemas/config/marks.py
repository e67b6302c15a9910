"""The mark in the types of settings that hardly anybody sets."""

from typing import Annotated, Final, TypeVar, get_type_hints

__all__ = ["ADVANCED", "Advanced", "advanced"]

ADVANCED: Final = "advanced"
"""Also the table of `trainspan.toml` in which they are set."""

_T = TypeVar("_T")

Advanced = Annotated[_T, ADVANCED]
"""Type of a setting that is set in `[advanced]` and hidden in the help of commands."""


def advanced(owner: type) -> tuple[str, ...]:
    """The settings of a section that have the mark."""
    hints = get_type_hints(owner, include_extras=True)
    return tuple(name for name, hint in hints.items() if ADVANCED in getattr(hint, "__metadata__", ()))
