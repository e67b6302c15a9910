"""Texts by models, tools and environments: long ones are cut in the middle and say so."""

import re
from typing import Final

from trainspan_viewer.html.elements import Child, Element, element
from trainspan_viewer.html.formats import count
from trainspan_viewer.queries.rollout.conversation import Text

__all__ = ["pre", "text_parts"]

_SPECIAL: Final = re.compile(r"(<\|[^|<>\s]{1,40}\|>|</?s>|\[/?INST\])")
"""Special tokens of common chat templates."""


def pre(text: Text, kind: str, *, before: str = "") -> Element:
    """The text as it is, with line ends and special tokens made visible."""
    start = element("span", before, class_="note") if before else None
    return element("pre", start, *text_parts(text), class_=kind)


def text_parts(text: Text) -> list[Child]:
    parts: list[Child] = [*_with_special(text.head)]
    if text.left_out:
        parts.append(element("span", f" ⟨{count(text.left_out)} {text.unit} left out⟩ ", class_="note"))
        parts += _with_special(text.tail)
    return parts


def _with_special(text: str) -> list[Child]:
    pieces = _SPECIAL.split(text)
    if len(pieces) > 400:  # somebody writes nothing but special tokens
        return [text]
    return [
        element("span", piece, class_="special") if index % 2 else piece for index, piece in enumerate(pieces) if piece
    ]
