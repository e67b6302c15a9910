"""The calls of a rollout over time, one lane per agent, and the color for an advantage."""

import math
from typing import Final

from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.arithmetic import number
from trainspan_viewer.html.elements import Element, element

__all__ = ["COLORS", "color", "timeline"]

COLORS: Final = 5
"""Shades of each sign."""


def color(advantage: float | None, greatest: float, *, trained: bool) -> str:
    """CSS class of a token: p1 to p5 and n1 to n5 by sign and size, z for 0, u if it is not trained."""
    if not trained:
        return "u"
    if not advantage or not greatest:
        return "z"
    shade = max(1, math.ceil(COLORS * min(abs(advantage) / greatest, 1.0) - 1e-9))
    return f"{'p' if advantage > 0 else 'n'}{shade}"


def timeline(account: RolloutAccount) -> Element:
    """One lane per agent, one for tools; a bar per call from its start to its end."""
    lanes = [*account.agents, *(["tools"] if account.tools else [])]
    moments = [call.start_s + (call.seconds or 0.0) for call in account.calls]
    moments += [call.start_s + (call.seconds or 0.0) for call in account.foreign]
    moments += [tool.start_s + (tool.seconds or 0.0) for tool in account.tools]
    span = max([*moments, account.seconds or 0.0, 1e-9])
    left, width, height = 150, 800, 22
    drawn: list[Element] = []
    for lane, name in enumerate(lanes):
        drawn.append(element("text", name[:24], x=0, y=height * lane + 15))
        drawn.append(
            element("line", class_="axis", x1=left, x2=left + width, y1=height * lane + 21, y2=height * lane + 21)
        )
    greatest = account.credit.greatest
    for call in account.calls:
        label = f"call {call.index}: {len(call.completion_ids)} tokens, advantage {number(call.advantage)}"
        lane = lanes.index(call.agent or "–")
        shade = color(call.advantage, greatest, trained=call.reason is None)
        drawn += _bar(call.start_s, call.seconds, span, lane, f"{shade} edge", label, str(call.index))
    for other in account.foreign:
        lane = lanes.index(other.agent or "–")
        drawn += _bar(other.start_s, other.seconds, span, lane, "u edge", f"call to {other.model or 'a model'}", "")
    for tool in account.tools:
        label = f"{tool.name}{' failed' if tool.failed else ''}"
        drawn += _bar(tool.start_s, tool.seconds, span, len(lanes) - 1, "failed" if tool.failed else "tool", label, "")
    total = height * len(lanes)
    drawn.append(element("text", f"{span:.3g} s", x=left + width, y=total + 14, **{"text-anchor": "end"}))
    whole, tall = left + width + 10, total + 20
    picture = element(
        "svg",
        *drawn,
        role="img",
        width=whole,
        height=tall,
        viewBox=f"0 0 {whole} {tall}",
        **{"aria-label": "calls over time"},
    )
    return element("figure", picture)


def _bar(
    start_s: float, seconds: float | None, span: float, lane: int, kind: str, label: str, text: str
) -> list[Element]:
    x = 150 + 800 * min(max(start_s / span, 0.0), 1.0)
    width = max(3.0, 800 * (seconds or 0.0) / span)
    box = element(
        "rect",
        element("title", label),
        class_=kind,
        x=round(x, 1),
        y=22 * lane + 4,
        width=round(width, 1),
        height=14,
        rx=2,
    )
    return [box, element("text", text, class_="index", x=round(x + 3, 1), y=22 * lane + 15)]
