"""Makes untrusted text (from models, tools, users) safe to show: it cannot control a terminal or reorder a page.

Escape sequences need ESC or a C1 control, reordering needs a bidirectional control: each is replaced by a visible sign.
Markup is handled elsewhere: pages build elements (html.py), the terminal prints `rich.text.Text`.
"""

from typing import Final

__all__ = ["visible"]

_KEPT: Final = {ord("\n"), ord("\t")}
_INVISIBLE: Final = [
    *range(0x7F, 0xA0),  # DEL and C1; U+009B and U+009D start sequences like ESC [ and ESC ]
    *(0xAD, 0x34F, 0x61C, 0xFEFF),
    *(0x115F, 0x1160, 0x3164, 0xFFA0),  # fillers of Hangul
    *(0x17B4, 0x17B5, 0x2800),
    *range(0x180B, 0x1810),
    *range(0x200B, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2060, 0x2070),
    *range(0xD800, 0xE000),  # lone surrogates, which no encoder accepts
    *range(0xFE00, 0xFE10),  # variation selectors, which can hide a text
    *range(0xFFF9, 0xFFFC),
    *range(0xE0000, 0xE1000),
]
_SIGNS: Final = {code: chr(0x2400 + code) for code in range(0x20) if code not in _KEPT} | {
    code: f"⟨U+{code:04X}⟩" for code in _INVISIBLE
}


def visible(text: str) -> str:
    """`text` with every control or invisible character except line feed and tab replaced, as in `␛]52` or `⟨U+202E⟩`."""
    return text.translate(_SIGNS)
