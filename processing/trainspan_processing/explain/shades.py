"""The shade of a token by its advantage, for the terminal and for pages."""

import math
from typing import Final

__all__ = ["SHADES", "shade"]

SHADES: Final = 5
"""Shades of each sign."""


def shade(advantage: float | None, greatest: float, *, trained: bool) -> str:
    """p1 to p5 and n1 to n5 by sign and size, z for 0, u if it is not trained."""
    if not trained:
        return "u"
    if not advantage or not greatest:
        return "z"
    size = max(1, math.ceil(SHADES * min(abs(advantage) / greatest, 1.0) - 1e-9))
    return f"{'p' if advantage > 0 else 'n'}{size}"
