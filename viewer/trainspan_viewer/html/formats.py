"""Numbers, times and sizes as text."""

import math
from datetime import UTC, datetime

__all__ = ["age", "count", "cut", "moment", "number", "plain", "seconds", "share", "short_id"]

_NONE = "–"


def number(value: float | None, digits: int = 4) -> str:
    """`digits` significant digits; "–" for None and NaN."""
    if value is None or math.isnan(value):
        return _NONE
    return f"{value:.{digits}g}"


def count(value: int | None) -> str:
    """With thin spaces between thousands."""
    return _NONE if value is None else f"{value:,}".replace(",", "\u2009")


def plain(value: object, digits: int = 4) -> str:
    """A value of any kind; a number that is not whole with `digits` significant digits."""
    if value is None:
        return _NONE
    return number(value, digits) if isinstance(value, float) else str(value)


def cut(text: str, most: int = 300) -> str:
    """The first `most` characters, and how many there are."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def short_id(text: str) -> str:
    """An id that nobody reads to its end: 12 characters, if it has more."""
    return text if len(text) <= 12 else f"{text[:12]}…"


def share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """A duration, in the unit that suits its size."""
    if value is None:
        return _NONE
    if value < 0:  # a clock went back
        return _NONE
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 100:
        return f"{value:.3g} s"
    if value < 600:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 100 else f"{value / 3600:.1f} h"


def age(value: float) -> str:
    """How long ago something happened."""
    return "now" if value < 1 else f"{seconds(value)} ago"


def moment(ns: int | None) -> str:
    """A time in UTC, from nanoseconds since the epoch."""
    return _NONE if ns is None else f"{datetime.fromtimestamp(ns / 1e9, UTC):%Y-%m-%d %H:%M:%S}"
