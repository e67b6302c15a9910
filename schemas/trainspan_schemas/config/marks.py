"""Marks in the types of settings: those that hardly anybody sets, and those that `[sft]` takes from `[train]`."""

from typing import Annotated, Final, TypeVar, get_type_hints

__all__ = ["ADVANCED", "OF_TRAIN", "Advanced", "OfTrain", "marked"]

ADVANCED: Final = "advanced"
"""Also the table of `trainspan.toml` in which they are set."""
OF_TRAIN: Final = "of [train]"

_T = TypeVar("_T")

Advanced = Annotated[_T, ADVANCED]
"""Type of a setting that is set in `[advanced]` and hidden in the help of commands."""
OfTrain = Annotated[_T, OF_TRAIN]
"""Type of a setting of `[sft]` whose value is that of `[train]`, unless its option is given."""


def marked(owner: type, mark: str) -> tuple[str, ...]:
    """The settings of a section that have the mark."""
    hints = get_type_hints(owner, include_extras=True)
    return tuple(name for name, hint in hints.items() if mark in getattr(hint, "__metadata__", ()))
