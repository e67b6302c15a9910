"""The conversation of a rollout: calls, calls to other models and tool steps, in the order of time."""

from typing import Final

from trainspan_processing.explain.account import CallAccount, ForeignAccount, RolloutAccount, ToolAccount
from trainspan_processing.explain.arithmetic import number
from trainspan_processing.explain.shades import SHADES, shade
from trainspan_viewer.html.elements import Child, Element, element, isolated, link
from trainspan_viewer.html.formats import count, seconds
from trainspan_viewer.pages.rollout.branches import measured_line
from trainspan_viewer.pages.rollout.marks import titled_marks
from trainspan_viewer.pages.rollout.texts import pre, text_parts
from trainspan_viewer.queries.requests.links import Links
from trainspan_viewer.queries.rollout.conversation import RecordedMessage, Step, Text, Turn, recorded_messages
from trainspan_viewer.queries.rollout.large import NOT_DERIVED, NOT_IN_DATASET

__all__ = ["advantage_legend", "conversation", "cut_off", "policy_of", "verdict_on"]

_MOST_TOOL: Final = 1_500


def conversation(
    account: RolloutAccount, steps: list[Step], links: Links | None, *, in_full: bool = False, is_part: bool = False
) -> list[Child]:
    """One section per step; without `links` for a page without navigation, and with `in_full` each token has a title.

    `is_part`: the calls come from the store alone (queries/rollout/large.py).
    """
    return [_step(account, step, links, in_full=in_full, is_part=is_part) for step in steps]


def advantage_legend(account: RolloutAccount) -> Element:
    greatest = number(account.credit.greatest)
    return element(
        "p",
        element("span", "from the environment, not trained (mask 0)", class_="env"),
        *(
            (
                element("span", f"trained, advantage −{greatest}", class_=f"n{SHADES}"),
                element("span", "0", class_="z"),
                element("span", f"+{greatest}", class_=f"p{SHADES}"),
            )
            if account.credit.greatest
            else (element("span", "trained, advantage 0", class_="z"),)
        ),
        element("span", "sampled, but not trained", class_="u"),
        class_="legend",
    )


def _step(account: RolloutAccount, step: Step, links: Links | None, *, in_full: bool, is_part: bool) -> Element:
    if isinstance(step, Turn):
        return _call(account, step, links, in_full=in_full, is_part=is_part)
    return _tool(step) if isinstance(step, ToolAccount) else _foreign(step)


def _call(account: RolloutAccount, turn: Turn, links: Links | None, *, in_full: bool, is_part: bool) -> Element:
    call = turn.call
    whose: list[Child] = [f"call {call.index} · ", isolated(call.agent or "no agent named")]
    if call.kind != "main":
        whose.append(f" · {call.kind} ({call.kind_rule})")
    if not is_part:
        whose.append(f" · turn {call.turn}")
    address = links.call(account.rollout_id, account.attempt, call.index) if links else None
    verdict = verdict_on(call)
    value = verdict if is_part else f"step reward {number(call.step_reward)}, value {number(call.value)}, {verdict}"
    known = f"⟨{turn.known} tokens as in call {turn.like}⟩ " if turn.known else ""
    kind = shade(call.advantage, account.credit.greatest, trained=call.reason is None)
    return element(
        "section",
        element("h3", link(address, *whose)) if address else element("h3", *whose),
        element("div", *_facts(call), class_="note"),
        element("div", value, class_="note" if call.reason is None or is_part else "bad"),
        measured_line(call),
        cut_off(call),
        element("div", "does not merge: ", isolated(call.broken), class_="warn") if call.broken else None,
        _recorded(turn.messages, turn.said_before),
        pre(turn.added, "env", before=known),
        _in_full(call, kind) if in_full and call.pieces is not None else pre(turn.answer, f"answer {kind}"),
        element("p", link(address, "tokens: log-probability, entropy, ratio …"), class_="more") if address else None,
        class_="step",
        id=f"call-{call.index}",
    )


def _facts(call: CallAccount) -> list[Child]:
    parts = [
        f"temperature {number(call.temperature)}",
        f"{len(call.prompt_ids)} prompt tokens, {len(call.completion_ids)} sampled",
    ]
    if call.segment is not None:
        continues = f"continues call {call.continues}" if call.continues is not None else "its first call"
        parts.append(f"segment {call.segment}, {continues}")
    return [
        f"{seconds(call.seconds)} from {call.start_s:.2f} s · ",
        isolated(policy_of(call)),
        " · finished: ",
        isolated(call.finish_reason or "–"),
        " · ",
        " · ".join(parts),
    ]


def verdict_on(call: CallAccount) -> str:
    """Its advantage, or why it has none."""
    if call.reason in (NOT_DERIVED, NOT_IN_DATASET):
        return call.reason
    return f"advantage {number(call.advantage)}" if call.reason is None else f"not trained: {call.reason}"


def cut_off(call: CallAccount) -> Element | None:
    """Says that an answer ended by its limit."""
    if call.finish_reason != "length":
        return None
    text = f"cut off at {count(len(call.completion_ids))} tokens (finish reason length)"
    return element("div", text, class_="warn")


def policy_of(call: CallAccount) -> str:
    """The policy that sampled, in words."""
    name = "" if call.policy_name in (None, "policy") else f" {call.policy_name}"
    return f"policy{name} version {count(call.policy_version)}"


def _in_full(call: CallAccount, kind: str) -> Element:
    pieces = call.pieces or []
    logprobs: list[float | None] = [*call.logprobs, *[None] * (len(pieces) - len(call.logprobs))]
    titles = [
        f"id {token}, log-probability {number(logprob)}"
        for token, logprob in zip(call.completion_ids, logprobs, strict=False)
    ]
    return titled_marks(pieces, kind, titles)


def _recorded(messages: list[RecordedMessage], before: int) -> Element | None:
    """The request as the client recorded it."""
    if not messages and not before:
        return None
    earlier = f", {before} as in the call before" if before else ""
    shown = [
        element(
            "div",
            element("span", isolated(message.role), ": ", class_="role"),
            *text_parts(message.text),
            class_="message",
        )
        for message in messages
    ]
    summary = element(
        "summary",
        f"request as the client recorded it: {len(messages)} message{'' if len(messages) == 1 else 's'}{earlier}",
    )
    return element("details", summary, *shown)


def _foreign(call: ForeignAccount) -> Element:
    answer = recorded_messages([call.answer]) if call.answer else []
    return element(
        "section",
        element(
            "h3",
            "call to ",
            isolated(call.model or "an unnamed model"),
            " · ",
            isolated(call.agent or "no agent named"),
        ),
        element("div", f"no tokens recorded, not trained: {call.reason}", class_="bad"),
        _recorded(recorded_messages(call.messages), 0),
        *(pre(message.text, "env") for message in answer),
        class_="step",
    )


def _tool(tool: ToolAccount) -> Element:
    rest = f"{' · failed' if tool.failed else ''} · {seconds(tool.seconds)}"
    return element(
        "section",
        element("h3", "tool ", isolated(tool.name), rest, class_="bad" if tool.failed else None),
        pre(Text.of(tool.arguments, _MOST_TOOL), "env") if tool.arguments else None,
        pre(Text.of(f"→ {tool.result}", _MOST_TOOL), "env") if tool.result else None,
        class_="step tool",
    )
