"""The form that asks what another credit would have given, and the answer in numbers."""

from collections.abc import Sequence

from trainspan_processing.explain.arithmetic import number
from trainspan_viewer.html.elements import Child, Element, element, link, table
from trainspan_viewer.pages.rollout.facts import derivation
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.requests.explain_request import field_text
from trainspan_viewer.queries.requests.links import Links
from trainspan_viewer.queries.rollout.what_if import CallChange, KnobState, WhatIf

__all__ = ["what_if_part"]

_KEPT = ("dataset", "attempt", "against", "start", "turn")
"""Parameters of the page that the form keeps."""
_MOST_ROWS = 400


def what_if_part(model: WhatIf, params: Params, links: Links, this: tuple[str, int] | None = None) -> Element:
    """The form, and below it every call's advantage before and after; `this` rollout's derivation is shown in full."""
    body: list[Child] = [_form(model, params)]
    if model.error:
        body.append(element("p", model.error, class_="bad", role="alert"))
    if model.group is not None:
        body.append(_verdict(model))
        body.append(_table(model.changes, links))
        for account in model.group.rollouts if this is None else filter(None, [model.account(*this)]):
            lines = derivation(account.credit)
            summary = element("summary", f"derivation of {account.rollout_id}")
            body.append(element("details", summary, lines, open=this is not None))
    summary = element("summary", "What if? Another credit, baseline, discount or rule")
    return element("details", summary, *body, open=model.is_changed, id="what-if", class_="what-if")


def _form(model: WhatIf, params: Params) -> Element:
    fields: list[Child] = [
        element("input", type="hidden", name=name, value=params.text(name)) for name in _KEPT if name in params.query
    ]
    fields += [_field(state) for state in model.knobs]
    return element(
        "form",
        *fields,
        element("button", "Compute"),
        link(
            Params(params.address, {}, {name: params.query[name] for name in _KEPT if name in params.query}).link(),
            "as it is",
        ),
        method="get",
        action=f"{params.address}#what-if",
        class_="filters",
    )


def _field(state: KnobState) -> Element:
    knob = state.knob
    mark = "changed" if state.is_changed else None
    if knob.choices:
        known: list[str] = list(knob.choices)
        if state.before is not None and state.before not in known:
            known.append(str(state.before))
        options = [element("option", "default", value="", selected=state.now is None)] if knob.may_be_absent else []
        options += [element("option", name, value=name, selected=name == state.now) for name in known]
        control = element("select", *options, name=knob.name, title=state.note, class_=mark)
    else:
        control = element(
            "input",
            name=knob.name,
            value=field_text(state.now),
            title=state.note,
            class_=mark,
            inputmode="decimal" if knob.is_number else None,
            size=6 if knob.is_number else 16,
            autocomplete="off",
        )
    return element("label", knob.name, control)


def _verdict(model: WhatIf) -> Element:
    changed = [f"{state.knob.name} = {field_text(state.now) or 'default'}" for state in model.knobs if state.is_changed]
    moved = sum(change.before[1:] != change.now[1:] for change in model.changes)
    text = f"With {', '.join(changed)}: {moved} of {len(model.changes)} calls shown here change."
    return element("p", text, role="status")


def _table(changes: Sequence[CallChange], links: Links) -> Element:
    rows: list[list[Child]] = [
        [
            link(links.rollout(change.rollout_id, change.attempt), change.rollout_id[:12]),
            change.call,
            change.agent or "–",
            number(change.before[0]),
            _advantage(change.before),
            number(change.now[0]),
            _advantage(change.now, is_new=change.before[1:] != change.now[1:]),
        ]
        for change in changes[:_MOST_ROWS]
    ]
    head = ["rollout", "call", "agent", "value", "advantage", "value then", "advantage then"]
    left = len(changes) - len(rows)
    caption = "advantages as they are and with the changed settings" + (f"; {left} more calls" if left else "")
    return table(head, rows, text=frozenset({0, 2}), caption=caption)


def _advantage(credited: tuple[float | None, float | None, str | None], *, is_new: bool = False) -> Element:
    _, advantage, reason = credited
    text = number(advantage) if reason is None else f"{number(advantage)} ({reason})"
    return element("span", text, class_="changed" if is_new else "note" if reason else None)
