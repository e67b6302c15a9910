"""Labels: the part of a page where a person gives one, the queue of what is worth it, and two rollouts side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from trainspan_schemas.store.labels import MOST_REASON_BYTES, MOST_WHO_BYTES, Label
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, filter_form, isolated, link, table
from trainspan_viewer.html.formats import count, cut, moment, number, short_id
from trainspan_viewer.html.paging import paging
from trainspan_viewer.pages.rollout.texts import pre
from trainspan_viewer.queries.labels.pair import PairModel, PairSide
from trainspan_viewer.queries.labels.queue import QueueItem, QueueModel, item_address, next_link, pair_address, queue_of
from trainspan_viewer.queries.labels.subject import RolloutKey, Subject

__all__ = ["Desk", "labels_part", "refused_label", "render_pair", "render_queue"]

_MOST_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class Desk:
    """What forms on a page need to write."""

    token: str | None
    """Proves that a form is the server's own; None: nobody may label."""
    back: str
    """The page's own address."""
    by: str
    """Who labels if the person does not say otherwise."""
    obstacle: str | None
    """Why no label can be given now."""
    queue: Mapping[str, str]
    """The queue that led to the page (queue_of)."""


def labels_part(
    subject: Subject, labels: Sequence[Label], pairs: Sequence[Label], desk: Desk, error: str = ""
) -> Element:
    """What people said about the subject of a page, with a form to say more.

    `labels` are those on a rollout or call, the oldest first; `pairs` the newest one of each pair.
    """
    parts: list[Child] = [element("p", error, class_="bad", role="alert")] if error else []
    newest = labels[-1] if labels else None
    if not subject.is_group:
        what = "call" if subject.span_id else "rollout"
        parts.append(element("p", *_state(newest, what), class_="note"))
        parts.append(_earlier(labels[:-1]))
    parts += [element("p", *_pair_line(label), class_="note") for label in pairs[:_MOST_LISTED]]
    if len(pairs) > _MOST_LISTED:
        parts.append(element("p", f"{count(len(pairs) - _MOST_LISTED)} more pairs", class_="note"))
    if subject.is_group:
        parts.append(_compare(subject, pairs))
    elif (why := _closed(desk)) is not None:
        parts.append(why)
    else:
        ((rollout_id, attempt),) = subject.rollouts
        fields = {
            "rollout": _named((rollout_id, attempt)),
            "call": subject.span_id,
            "seen": newest.id if newest else "",
        }
        buttons = [_button("good", "good (g)", "g"), _button("bad", "bad (b)", "b")]
        if newest and not newest.is_withdrawn:
            buttons.append(_button("withdrawn", "take back (u)", "u"))
        parts.append(_form(fields, buttons, desk, next_link(desk.queue, [(rollout_id, attempt)])))
    return element("section", *parts, id="labels", class_="labels", aria_label="labels")


def render_queue(model: QueueModel) -> Page:
    """What is worth labeling."""
    looked = f"{count(model.looked_at)} rollouts were looked at"
    if model.is_cut:
        is_chosen = model.params.text("run").strip() or model.params.text("round").strip()
        looked += ", of more" if is_chosen else ", the newest ones"
    about = f"{looked}; {count(model.labeled)} of them are labeled, {count(model.pairs)} of their pairs are compared."
    rows = [
        _queue_row(item, item_address(item, model.params, place))
        for place, item in enumerate(model.items, model.part.start)
    ]
    first = next_link(queue_of(model.params))
    body: list[Child] = [
        element("p", f"Labels cannot be given now: {model.obstacle}.", class_="warn", role="status")
        if model.obstacle
        else None,
        filter_form("/labels", {name: model.params.text(name) for name in ("run", "round")}),
        element("p", about, class_="note"),
        element("p", link(first, "label the first one (n)", data_key="n"), class_="pages") if rows else None,
        table(
            ["task", "why", "figures", "reward", "what the judge said"],
            rows,
            text=frozenset({0, 1, 2, 4}),
            caption="worth labeling",
        )
        if rows
        else element(
            "p", "Nothing here is worth labeling more than anything else: every verdict is clear.", class_="note"
        ),
        paging(model.params.link, *model.part, "items"),
    ]
    return Page("What is worth labeling", body, section="labels")


def render_pair(model: PairModel, desk: Desk) -> Page:
    """Two rollouts without their rewards, and a form that says which is better."""
    left, right = model.sides
    parts: list[Child] = [element("p", *_pair_state(model), class_="note")]
    if (why := _closed(desk)) is not None:
        parts.append(why)
    else:
        fields = {
            "rollout": _named(left.key),
            "other": _named(right.key),
            "seen": model.label.id if model.label else "",
        }
        buttons = [
            _button("better", "left is better (1)", "1"),
            _button("worse", "right is better (2)", "2"),
            _button("equal", "equal (0)", "0"),
        ]
        if model.label and not model.label.is_withdrawn:
            buttons.append(_button("withdrawn", "take back (u)", "u"))
        parts.append(_form(fields, buttons, desk, next_link(desk.queue, [left.key, right.key])))
    body: list[Child] = [
        element("section", *parts, id="labels", class_="labels", aria_label="labels"),
        element("p", "answer of the task: ", isolated(cut(model.answer)), class_="note") if model.answer else None,
        element("div", _side("left", left), _side("right", right), class_="pair"),
    ]
    return Page(f"Which is better? Task {model.task_id or '–'}", body, section="labels")


def refused_label(reason: str, text: str, title: str = "The label was not given") -> Page:
    """Why the label is not there, with the reason that the person wrote."""
    draft = [element("p", "You wrote:"), element("pre", text[: 4 * MOST_REASON_BYTES], dir="auto")] if text else []
    return Page(title, [element("p", reason, class_="bad", role="alert"), *draft], section="labels")


def _state(label: Label | None, what: str) -> list[Child]:
    if label is None:
        return [f"This {what} has no label."]
    if label.is_withdrawn:
        return ["The label was taken back by ", *_by(label)]
    return [
        "Labeled ",
        element("strong", label.word, class_="ok" if label.word == "good" else "bad"),
        " by ",
        *_by(label),
    ]


def _by(label: Label) -> list[Child]:
    reason: list[Child] = [": ", isolated(label.reason)] if label.reason else []
    return [isolated(label.by), f", {moment(label.time_ns)} UTC", *reason]


def _earlier(labels: Sequence[Label]) -> Element | None:
    """The labels that later ones replace."""
    if not labels:
        return None
    rows = [element("li", f"{label.word} by ", *_by(label)) for label in labels[-_MOST_LISTED:]]
    return element("details", element("summary", f"{len(labels)} earlier"), element("ul", *rows), id="earlier-labels")


def _pair_line(label: Label) -> list[Child]:
    assert label.other is not None
    address = pair_address((label.rollout_id, label.attempt), label.other)
    than = "as good as" if label.word == "equal" else f"{label.word} than"
    return [
        isolated(short_id(label.rollout_id)),
        " is ",
        link(address, f"{than} {short_id(label.other[0])}"),
        " by ",
        *_by(label),
    ]


def _pair_state(model: PairModel) -> list[Child]:
    label = model.label
    if label is None:
        return ["This pair has no label. Rewards are not shown, and the order does not depend on them."]
    if label.is_withdrawn:
        return ["The label was taken back by ", *_by(label)]
    side = "left" if (label.rollout_id, label.attempt) == model.sides[0].key else "right"
    said = "both are equal" if label.word == "equal" else f"the {side} one is {label.word}"
    return [element("strong", said), ", by ", *_by(label)]


def _compare(subject: Subject, pairs: Sequence[Label]) -> Element:
    """A link to the first two rollouts that were not compared yet, and a form for any two."""
    done = {frozenset(((label.rollout_id, label.attempt), label.other)) for label in pairs}
    keys = sorted(subject.rollouts)
    fresh = next(((a, b) for a in keys for b in keys if a < b and frozenset((a, b)) not in done), (keys[0], keys[1]))
    options = [
        element(
            "select",
            *(
                element(
                    "option",
                    short_id(rollout_id),
                    value=f"{rollout_id}:{attempt}",
                    selected=(rollout_id, attempt) == chosen,
                )
                for rollout_id, attempt in keys[:100]
            ),
            name=name,
            aria_label=label,
        )
        for name, label, chosen in (("a", "one rollout", fresh[0]), ("b", "another rollout", fresh[1]))
    ]
    return element(
        "form",
        "Which is better, ",
        options[0],
        " or ",
        options[1],
        " ",
        element("button", "compare (c)", type="submit", data_key="c"),
        method="get",
        action="/labels/pair",
        class_="filters",
    )


def _closed(desk: Desk) -> Element | None:
    """Why there is no form; None if there is one."""
    if desk.token is None:
        return element("p", "This server takes no labels.", class_="note")
    if desk.obstacle is not None:
        return element("p", f"Labels cannot be given now: {desk.obstacle}.", class_="warn", role="status")
    return None


def _form(fields: Mapping[str, str | None], buttons: Sequence[Element], desk: Desk, after: str) -> Element:
    hidden = {"token": desk.token, "back": desk.back, **fields}
    return element(
        "form",
        *(
            element("input", type="hidden", name=name, value=value)
            for name, value in hidden.items()
            if value is not None
        ),
        element("p", *(part for button in buttons for part in (button, " ")), link(after, "next (n)", data_key="n")),
        element(
            "label",
            "reason (r)",
            element("textarea", name="text", rows=2, maxlength=MOST_REASON_BYTES, dir="auto", data_key="r"),
        ),
        element(
            "label",
            "who",
            element("input", name="by", value=desk.by, required=True, maxlength=MOST_WHO_BYTES, data_keep="by"),
        ),
        method="post",
        action="/labels",
    )


def _button(word: str, text: str, key: str) -> Element:
    return element("button", text, type="submit", name="word", value=word, data_key=key)


def _named(key: RolloutKey) -> str:
    return quote(f"{key[0]}:{key[1]}", safe="")  # invisible characters would be shown as signs


def _queue_row(item: QueueItem, address: str) -> list[Child]:
    name = isolated(cut(item.task_id or item.rollouts[0][0]))
    said = isolated(cut(item.explanation)) if item.explanation else "–"
    return [link(address, name), item.why, isolated(item.detail), number(item.reward), said]


def _side(name: str, side: PairSide) -> Element:
    parts: list[Child] = [element("h2", name), element("p", isolated(side.status), class_="note")]
    for place, turn in enumerate(side.turns):
        parts.append(element("div", isolated(turn.name), class_="note") if turn.name else None)
        if turn.added.head or turn.added.left_out:
            parts.append(
                element(
                    "details",
                    element("summary", "what the environment added"),
                    pre(turn.added, "env"),
                    open=place == 0,
                )
            )
        parts.append(pre(turn.answer, "answer"))
    if side.left_out:
        parts.append(element("p", f"{count(side.left_out)} more calls are not shown", class_="note"))
    return element("section", *parts, class_="step", aria_label=name)
