"""What happened when: model calls by agent, tool steps, and the gaps in which neither ran."""

from collections.abc import Mapping, Sequence
from typing import Final

from trainspan_processing.explain.account import CallAccount, ForeignAccount, RolloutAccount, ToolAccount
from trainspan_processing.explain.shades import shade
from trainspan_viewer.html.elements import Element, element, svg
from trainspan_viewer.html.formats import count, seconds
from trainspan_viewer.pages.rollout.conversation import verdict_on

__all__ = ["gaps_of", "timeline"]

_LEFT, _WIDTH, _HEIGHT = 150, 800, 22
_MOST_BARS: Final = 1_000
"""Bars of all kinds together; the first of each kind are drawn."""
_MOST_LABEL: Final = 120
_MOST_LANES: Final = 40
_SHORTEST_GAP: Final = 0.005
"""Share of the whole below which a gap is not drawn."""

Interval = tuple[float, float]


def timeline(account: RolloutAccount) -> Element:
    """One lane per agent, one for tools, one for gaps; a bar from start to end, its color the advantage.

    Agents that are too many share one lane.
    """
    agents = account.agents if len(account.agents) <= _MOST_LANES else account.agents[: _MOST_LANES - 1]
    more = len(account.agents) - len(agents)
    n_agents = len(agents) + (more > 0)
    lanes = [*agents, *([f"{more} more agents"] if more else []), *(["tools"] if account.tools else []), "gaps"]
    span = _length(account)
    drawn: list[Element] = []
    for lane, name in enumerate(lanes):
        drawn.append(element("text", name[:24], x=0, y=_HEIGHT * lane + 15))
        y = _HEIGHT * lane + 21
        drawn.append(element("line", class_="rule", x1=_LEFT, x2=_LEFT + _WIDTH, y1=y, y2=y))
    drawn += _bars(account, {name: lane for lane, name in enumerate(agents)}, n_agents, span)
    busy = gaps_of(account)
    for start, end in busy:
        if end - start >= _SHORTEST_GAP * span:
            drawn += _bar(
                start, end - start, span, len(lanes) - 1, "gap", f"nothing ran for {seconds(end - start)}", ""
            )
    total = _HEIGHT * len(lanes)
    drawn.append(element("text", "0 s", x=_LEFT, y=total + 14))
    drawn.append(element("text", seconds(span), x=_LEFT + _WIDTH, y=total + 14, **{"text-anchor": "end"}))
    whole, tall = _LEFT + _WIDTH + 10, total + 20
    picture = svg(whole, tall, "calls, tools and gaps over time", *drawn, class_="wide")
    scroll = element("div", picture, class_="scroll", tabindex=0, role="region", aria_label="timeline")
    return element("figure", scroll, element("figcaption", _summary(account, busy, span)))


def gaps_of(account: RolloutAccount) -> list[Interval]:
    """The times within the rollout, in seconds since it began, at which no call and no tool step ran."""
    ran = sorted((max(step.start_s, 0.0), step.start_s + (step.seconds or 0.0)) for step in _steps(account))
    gaps: list[Interval] = []
    until = 0.0
    for start, end in ran:
        if start > until:
            gaps.append((until, start))
        until = max(until, end)
    if account.seconds is not None and account.seconds > until:
        gaps.append((until, account.seconds))
    return gaps


def _length(account: RolloutAccount) -> float:
    return max([step.start_s + (step.seconds or 0.0) for step in _steps(account)] + [account.seconds or 0.0, 1e-9])


def _steps(account: RolloutAccount) -> list[CallAccount | ForeignAccount | ToolAccount]:
    return [*account.calls, *account.foreign, *account.tools]


def _summary(account: RolloutAccount, gaps: Sequence[Interval], span: float) -> str:
    calls = _covered([(step.start_s, step.seconds) for step in _steps(account) if not isinstance(step, ToolAccount)])
    tools = _covered([(tool.start_s, tool.seconds) for tool in account.tools])
    idle = sum(end - start for start, end in gaps)
    shares = [f"model calls {seconds(calls)} ({calls / span:.0%})"]
    if account.tools:
        shares.append(f"tools {seconds(tools)} ({tools / span:.0%})")
    shares_text = ", ".join([*shares, f"neither {seconds(idle)} ({idle / span:.0%})"]) + f" of {seconds(span)}"
    drawn, have = sum(_drawn(account)), len(_steps(account))
    return shares_text if drawn == have else f"{shares_text}; drawn: the first {count(drawn)} of {count(have)} steps"


def _covered(parts: Sequence[tuple[float, float | None]]) -> float:
    """Seconds covered by at least one of the parts (start, duration)."""
    ends = sorted((start, start + (length or 0.0)) for start, length in parts)
    total, until = 0.0, 0.0
    for start, end in ends:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _bars(account: RolloutAccount, lane_of: Mapping[str, int], n_agents: int, span: float) -> list[Element]:
    drawn: list[Element] = []
    last = n_agents - 1
    n_calls, n_foreign, n_tools = _drawn(account)
    for call in account.calls[:n_calls]:
        kind = f"{shade(call.advantage, account.credit.greatest, trained=call.reason is None)} edge"
        verdict = verdict_on(call)
        whose = "" if call.kind == "main" else f", {call.kind}"
        label = f"call {call.index}{whose}: {len(call.completion_ids)} tokens in {seconds(call.seconds)}, {verdict}"
        lane = lane_of.get(call.agent or "–", last)
        drawn += _bar(call.start_s, call.seconds, span, lane, kind, label, str(call.index))
    for other in account.foreign[:n_foreign]:
        lane = lane_of.get(other.agent or "–", last)
        drawn += _bar(other.start_s, other.seconds, span, lane, "u edge", f"call to {other.model or 'a model'}", "")
    for tool in account.tools[:n_tools]:
        label = f"{tool.name}{' failed' if tool.failed else ''}, {seconds(tool.seconds)}"
        drawn += _bar(tool.start_s, tool.seconds, span, last + 1, "failed" if tool.failed else "tool", label, "")
    return drawn


def _drawn(account: RolloutAccount) -> tuple[int, int, int]:
    """How many calls, calls to other models and tool steps are drawn: equal parts if they are too many."""
    have = (len(account.calls), len(account.foreign), len(account.tools))
    if sum(have) <= _MOST_BARS:
        return have
    left, drawn = _MOST_BARS, [0, 0, 0]
    for rank, which in enumerate(sorted(range(3), key=lambda kind: have[kind])):
        drawn[which] = min(have[which], left // (3 - rank))
        left -= drawn[which]
    return drawn[0], drawn[1], drawn[2]


def _bar(
    start_s: float, length: float | None, span: float, lane: int, kind: str, label: str, text: str
) -> list[Element]:
    x = _LEFT + _WIDTH * min(max(start_s / span, 0.0), 1.0)
    width = min(max(3.0, _WIDTH * (length or 0.0) / span), _LEFT + _WIDTH + 3 - x)
    y = _HEIGHT * lane
    box = element(
        "rect",
        element("title", label[:_MOST_LABEL]),
        class_=kind,
        x=round(x, 1),
        y=y + 4,
        width=round(width, 1),
        height=14,
        rx=2,
    )
    fits = text and width >= 7 * len(text) + 4
    return [box, element("text", text, class_="index", x=round(x + 3, 1), y=y + 15)] if fits else [box]
