"""Tokens as marks: each in its own element, colored by a value in nine or eleven steps, exact numbers beside them."""

import math
from collections.abc import Sequence
from typing import Final

from trainspan_processing.explain.arithmetic import number
from trainspan_viewer.html.elements import Child, Element, element

__all__ = ["joined", "legend", "level", "marks", "titled_marks"]

_STEPS: Final = 8
"""Steps of a scale from 0; a scale with signs has half as many on each side."""


def level(value: float | None, greatest: float, *, is_signed: bool) -> str:
    """The CSS class of a value: q0 to q8 from 0, or m4 to m1, z, a1 to a4 by sign; u without a value."""
    if value is None or not math.isfinite(value):
        return "u"
    share = min(abs(value) / greatest, 1.0) if greatest else 0.0
    if not is_signed:
        return f"q{round(_STEPS * share)}"
    if value == 0 or not greatest:
        return "z"
    step = max(1, math.ceil(_STEPS // 2 * share - 1e-9))
    return f"{'a' if value > 0 else 'm'}{step}"


def marks(pieces: Sequence[str], kinds: Sequence[str], **attributes: str) -> Element:
    """(T,) pieces as one element each; a run of equal classes is one element around its tokens, so that pages stay small."""
    runs: list[Child] = []
    start = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or kinds[end] != kinds[start]:
            tokens = [element("i", _shown(piece)) for piece in pieces[start:end]]
            if len(tokens) == 1:
                tokens[0].set("class", kinds[start])
                runs.append(tokens[0])
            else:
                runs.append(element("span", *tokens, class_=kinds[start]))
            start = end
    return element("pre", *runs, class_="tokens", **attributes)


def titled_marks(pieces: Sequence[str], kind: str, titles: Sequence[str]) -> Element:
    """The tokens of one class, each with a title, for a page without a script."""
    tokens = (element("i", _shown(piece), title=title) for piece, title in zip(pieces, titles, strict=True))
    return element("pre", element("span", *tokens, class_=kind), class_="tokens")


def joined(values: Sequence[float | int | None]) -> str:
    """The values as compact text, separated by commas; nothing for None."""
    return ",".join(
        "" if value is None else str(value) if isinstance(value, int) else f"{value:.5g}" for value in values
    )


def legend(greatest: float, *, is_signed: bool, is_capped: bool = False, is_negative: bool = False) -> Element:
    """The steps of the scale with their numbers, which are all negative if `is_negative`."""
    parts: list[Child] = []
    if is_signed:
        half = _STEPS // 2
        sizes = range(1, half + 1)
        parts += [element("span", number(-greatest * step / half), class_=f"m{step}") for step in reversed(sizes)]
        parts.append(element("span", "0", class_="z"))
        parts += [element("span", f"+{number(greatest * step / half)}", class_=f"a{step}") for step in sizes]
    else:
        for step in range(_STEPS + 1):
            end = (-1 if is_negative and step else 1) * greatest * step / _STEPS
            beyond = ("≤ " if is_negative else "≥ ") if is_capped and step == _STEPS else ""
            parts.append(element("span", f"{beyond}{number(end)}", class_=f"q{step}"))
    parts.append(element("span", "no value", class_="u"))
    return element("p", *parts, class_="legend")


def _shown(piece: str) -> str:
    return piece.replace("\n", "⏎\n") if piece else "·"
