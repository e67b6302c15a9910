"""The account of a rollout as an HTML page: calls by agent over time, reward edges, credit in numbers, tokens in color."""

import json
from typing import Final

from trainspan_processing.explain.account import CallAccount, EdgeAccount, ForeignAccount, RolloutAccount, ToolAccount
from trainspan_processing.explain.arithmetic import number
from trainspan_processing.text.dialects import Message
from trainspan_viewer.html.document import Page, standalone
from trainspan_viewer.html.elements import Child, Element, element, table
from trainspan_viewer.pages.timeline import COLORS, color, timeline

__all__ = ["explanation_page"]

_MOST_TOKENS: Final = 20_000
"""Up to this many trained tokens on a page, each token gets its own element."""

_STYLE: Final = """
.t { border-radius: 2px; box-shadow: inset -1px 0 0 rgba(255,255,255,.8) } .env { color: #57606a; background: #f6f8fa }
.p1 { background: #e6f6e9; fill: #e6f6e9 } .p2 { background: #cdeed4; fill: #cdeed4 } .p3 { background: #b0e4bc; fill: #b0e4bc }
.p4 { background: #90d9a1; fill: #90d9a1 } .p5 { background: #6fcd86; fill: #6fcd86 }
.n1 { background: #fdecea; fill: #fdecea } .n2 { background: #fbd8d4; fill: #fbd8d4 } .n3 { background: #f8c0ba; fill: #f8c0ba }
.n4 { background: #f5a8a0; fill: #f5a8a0 } .n5 { background: #f28d83; fill: #f28d83 }
.z { background: #eaeef2; fill: #eaeef2 } .u { background: repeating-linear-gradient(45deg, #eaeef2 0 4px, #f6f8fa 4px 8px); fill: #d0d7de }
svg text.index { fill: #1b1f24 } section .note { font-size: 13px } .legend span { color: #1b1f24 }
svg .edge { stroke: #57606a; stroke-width: .7 } svg .tool { fill: #bf8700 } svg .failed { fill: #cf222e }
section { border-left: 3px solid #d8dee4; padding: 0 0 0 .9rem; margin: 1.1rem 0 } section.tool { border-color: #bf8700 }
section pre { border-radius: 4px; padding: .3rem .5rem; background: #fff; border: 1px solid #eaeef2 }
summary { color: #57606a; cursor: pointer; font-size: 13px } .role { font-weight: 600 } .legend span { padding: 0 .5rem }
.message { margin: .3rem 0 } ol.sum { font: 13px/1.7 ui-monospace, monospace; overflow-wrap: anywhere }
"""


def explanation_page(account: RolloutAccount) -> str:
    """HTML without scripts; all text from models, tools and users is escaped."""
    title = f"Rollout {account.rollout_id}"
    body: list[Child] = [
        _facts(account),
        element("h2", "Calls by agent"),
        timeline(account),
        element("h2", "Rewards"),
        _edges(account.edges),
        element("h2", "Credit"),
        element("ol", *(element("li", line) for line in account.credit.lines), class_="sum"),
        *_group(account),
        element("h2", "Calls in order"),
        _legend(account),
        *_steps(account),
    ]
    return standalone(Page(title, body), _STYLE)


def _facts(account: RolloutAccount) -> Element:
    rows: list[list[Child]] = [
        ["task", account.task_id or "–"],
        ["run, round, attempt", f"{account.run_id or '–'}, {_or_dash(account.round)}, {account.attempt}"],
        ["status, split", f"{account.status or '–'}, {account.split or '–'}"],
        ["duration", "–" if account.seconds is None else f"{account.seconds:.3f} s"],
        ["reward", number(account.credit.reward)],
        [
            "calls",
            f"{len(account.calls) + len(account.foreign)}, of which {sum(call.reason is None for call in account.calls)} trained",
        ],
    ]
    if account.reason:
        rows.append(["not trained because", account.reason])
    rows.extend(["missing", f"{lack.what} → {lack.advice}"] for lack in account.lacks)
    rows.extend([f"{one.reason}: calls {', '.join(map(str, one.calls))}", one.advice] for one in account.untrained)
    if account.verdict:
        rows.append(["dataset", account.verdict])
    rows.append(
        ["text", f"decoded with {account.decoded_with}" if account.decoded_with else "token ids: no tokenizer found"]
    )
    return table(["", ""], rows, text=frozenset({0, 1}))


def _edges(edges: list[EdgeAccount]) -> Element:
    if not edges:
        return element("p", "This rollout has no rewards.", class_="note")
    rows: list[list[Child]] = [
        [
            number(edge.score),
            edge.name,
            edge.source,
            "–" if edge.at_s is None else f"{edge.at_s:.3f} s",
            edge.on or "–",
            edge.rule or "does not count",
            "–" if edge.rule is None else "rollout" if edge.call is None else f"call {edge.call}",
            edge.why,
        ]
        for edge in edges
    ]
    head = ["score", "name", "from", "at", "recorded on", "rule", "falls on", "because"]
    return table(head, rows, text=frozenset({1, 2, 4, 5, 6, 7}))


def _group(account: RolloutAccount) -> list[Child]:
    members = account.credit.members
    if not members:
        return []
    rows: list[list[Child]] = [[m.rollout_id, m.attempt, number(m.reward), m.calls] for m in members]
    this = next(place for place, member in enumerate(members) if member.is_this)
    group = table(["rollout", "attempt", "R", "calls"], rows, this=this)
    return [element("details", element("summary", f"its group: {len(members)} rollouts"), group)]


def _legend(account: RolloutAccount) -> Element:
    greatest = number(account.credit.greatest)
    return element(
        "p",
        "Tokens: ",
        element("span", "given by the environment, not trained (mask 0)", class_="env"),
        element("span", f"trained, advantage −{greatest}", class_=f"n{COLORS}"),
        element("span", "0", class_="z"),
        element("span", f"+{greatest}", class_=f"p{COLORS}"),
        element("span", "sampled, but not trained", class_="u"),
        " The scale ends at the greatest advantage within the group. Hover over a token for its id and log-probability.",
        class_="legend note",
    )


def _steps(account: RolloutAccount) -> list[Element]:
    in_full = sum(len(call.completion_ids) for call in account.calls) <= _MOST_TOKENS
    drawn: list[tuple[float, int, Element]] = [
        (call.start_s, call.index, _call(call, account.credit.greatest, in_full=in_full)) for call in account.calls
    ]
    drawn += [(other.start_s, -1, _other(other)) for other in account.foreign]
    drawn += [(tool.start_s, -1, _tool(tool)) for tool in account.tools]
    calls_first = sorted(drawn, key=lambda item: (item[0], -item[1]))
    return [made for _, _, made in calls_first]


def _call(call: CallAccount, greatest: float, *, in_full: bool) -> Element:
    whose = f"call {call.index} · {call.agent or 'no agent named'} · turn {call.turn}"
    facts = [
        f"policy {call.policy_name or '–'} version {_or_dash(call.policy_version)}",
        f"temperature {number(call.temperature)}",
        f"{len(call.prompt_ids)} prompt tokens, {len(call.completion_ids)} sampled",
        f"finished: {call.finish_reason or '–'}",
    ]
    if call.segment is not None:
        place = f"segment {call.segment}"
        facts.append(
            f"{place}, continues call {call.continues}" if call.continues is not None else f"{place}, its first call"
        )
    verdict = f"advantage {number(call.advantage)}" if call.reason is None else f"not trained: {call.reason}"
    value = f"step reward {number(call.step_reward)}, value {number(call.value)}, {verdict}"
    return element(
        "section",
        element("h3", whose),
        element("div", " · ".join(facts), class_="note"),
        element("div", value, class_="note" if call.reason is None else "note bad"),
        element("div", f"does not merge: {call.broken}", class_="note") if call.broken else None,
        _messages(call.messages),
        _environment(call),
        _completion(call, greatest, in_full=in_full),
        class_="call",
    )


def _environment(call: CallAccount) -> Element:
    new = call.prompt_ids[call.prefix_len :]
    text = _ids(new) if call.prompt_text is None else _line_ends(call.prompt_text)
    kept = f"⟨{call.prefix_len} tokens of call {call.continues} and before⟩ " if call.prefix_len else ""
    return element("pre", element("span", kept, class_="note") if kept else None, text, class_="env")


def _completion(call: CallAccount, greatest: float, *, in_full: bool) -> Element:
    kind = f"t {color(call.advantage, greatest, trained=call.reason is None)}"
    pieces = call.pieces if call.pieces is not None else [f"{token} " for token in call.completion_ids]
    if not in_full:
        return element("pre", element("span", _line_ends("".join(pieces)), class_=kind))
    logprobs: list[float | None] = [*call.logprobs, *[None] * (len(pieces) - len(call.logprobs))]
    spans = [
        element("span", _line_ends(piece), class_=kind, title=f"id {token}, log-probability {number(logprob)}")
        for piece, token, logprob in zip(pieces, call.completion_ids, logprobs, strict=False)
    ]
    return element("pre", *spans)


def _messages(messages: list[Message]) -> Element | None:
    if not messages:
        return None
    shown = [
        element(
            "div", element("span", f"{message.get('role', '?')}: ", class_="role"), _said(message), class_="message"
        )
        for message in messages
    ]
    return element(
        "details", element("summary", f"request as the client recorded it: {len(messages)} messages"), *shown
    )


def _said(message: Message) -> str:
    """Everything except the role, with anything other than text as JSON."""
    content = message.get("content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content", "finish_reason")}
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    return " ".join(filter(None, (text, json.dumps(rest, ensure_ascii=False) if rest else "")))


def _other(call: ForeignAccount) -> Element:
    return element(
        "section",
        element("h3", f"call to {call.model or 'an unnamed model'} · {call.agent or 'no agent named'}"),
        element("div", f"no tokens recorded, not trained: {call.reason}", class_="note bad"),
        _messages(call.messages),
        element("pre", _said(call.answer), class_="env") if call.answer else None,
        class_="call",
    )


def _tool(tool: ToolAccount) -> Element:
    heading = f"tool {tool.name}{' · failed' if tool.failed else ''}"
    return element(
        "section",
        element("h3", heading, class_="bad" if tool.failed else "tool"),
        element("pre", f"{tool.arguments or ''}", class_="env") if tool.arguments else None,
        element("pre", f"→ {tool.result}", class_="env") if tool.result else None,
        class_="tool",
    )


def _ids(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def _line_ends(text: str) -> str:
    return text.replace("\n", "⏎\n")


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)
