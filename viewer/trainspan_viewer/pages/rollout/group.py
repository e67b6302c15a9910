"""The page of a group: siblings side by side, turn by turn, rewards and advantages above each."""

from typing import Final
from urllib.parse import quote

from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.arithmetic import number
from trainspan_processing.explain.shades import shade
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, isolated, link, table
from trainspan_viewer.html.formats import count, seconds
from trainspan_viewer.pages.rollout.conversation import advantage_legend, cut_off
from trainspan_viewer.pages.rollout.texts import text_parts
from trainspan_viewer.pages.rollout.what_if import what_if_part
from trainspan_viewer.queries.addresses import dataset_address
from trainspan_viewer.queries.rollout.alignment import SiblingDivergence, Turn
from trainspan_viewer.queries.rollout.explained import MEMBERS
from trainspan_viewer.queries.rollout.group import Cell, GroupModel, LargeGroup, Sibling

__all__ = ["render_group"]

_MOST_OF_NAME: Final = 80


def render_group(model: GroupModel | LargeGroup) -> Page:
    return _large(model) if isinstance(model, LargeGroup) else _side_by_side(model)


def _large(model: LargeGroup) -> Page:
    rows: list[list[Child]] = [
        [
            link(model.links.rollout(rollout.rollout_id, -1), rollout.rollout_id[:60]),
            count(rollout.spans),
            count(rollout.calls),
        ]
        for rollout in model.largest
    ]
    body: list[Child] = [
        element("p", f"{model.why}. So they are not put side by side; each has a page.", class_="warn", role="status"),
        table(["rollout", "spans", "calls"], rows, caption="the largest of those that were counted") if rows else None,
    ]
    return Page("A group that is too large" if rows else "A group that is not derived", body, section="datasets")


def _side_by_side(model: GroupModel) -> Page:
    first = model.group.rollouts[0]
    compared = max(len(rollout.credit.members) for rollout in model.group.rollouts)
    about: list[Child] = [
        f"{len(model.group.keys)} rollouts, {compared} compared · run ",
        isolated(first.run_id or "–"),
        f", round {count(first.round)}",
    ]
    body: list[Child] = [
        element("p", *about, class_="note"),
        element("p", *_common(model), class_="lead"),
        _verdict_on_rewards(model),
        _absent_reference(model),
        what_if_part(model.what_if, model.params, model.links),
        advantage_legend(first),
        _grid(model),
        _pages(model),
    ]
    crumbs = [(first.run_id, f"/runs/{quote(first.run_id, safe='')}")] if first.run_id else []
    if model.dataset:
        crumbs.append((model.dataset.rpartition(":")[2], dataset_address(model.dataset)))
    return Page(f"Group of task {first.task_id or '–'}", body, section="datasets", crumbs=crumbs)


def _common(model: GroupModel) -> list[Child]:
    if len(model.group.keys) < 2:
        return ["There is no other rollout to compare with."]
    if model.common is None:
        return ["All rollouts shown here have exactly the same tokens."]
    return ["The first of them depart at ", *_departure(model.common, model), "."]


def _verdict_on_rewards(model: GroupModel) -> Element | None:
    """What the rewards alone show: a judge that contradicts itself, or nothing to learn from."""
    if (contradiction := model.contradiction) is not None:
        better, worse = contradiction.better.credit.reward, contradiction.worse.credit.reward
        return element(
            "p",
            "The judge may be wrong: answers that differ only in case, spaces or punctuation have different rewards, ",
            element("code", contradiction.answers[0]),
            f" R = {number(better)} and ",
            element("code", contradiction.answers[1]),
            f" R = {number(worse)}.",
            class_="warn",
        )
    rewards = {rollout.credit.reward for rollout in model.group.rollouts} - {None}
    if len(rewards) == 1 and len(model.group.rollouts) > 1:
        text = f"All rollouts shown here have the same reward, {number(next(iter(rewards)))}: they have no advantage over each other."
        return element("p", text, class_="warn")
    return None


def _absent_reference(model: GroupModel) -> Element | None:
    if any(sibling.is_reference for sibling in model.siblings):
        return None
    reference = model.reference
    address = model.links.rollout(reference.rollout_id, reference.attempt)
    about = f", attempt {reference.attempt}, R = {number(reference.credit.reward)}."
    return element("p", "They are compared with ", link(address, reference.rollout_id[:12]), about, class_="note")


def _departure(divergence: SiblingDivergence, model: GroupModel) -> list[Child]:
    part = divergence.part
    where = ", which not all of them have" if part == "absent" else f", token {divergence.token} of the {part}"
    return [*_turn_name(divergence.turn, model), where]


def _turn_name(turn: Turn, model: GroupModel) -> list[Child]:
    """A turn's number, and its agent if there are several."""
    agent, position = turn
    if len({name for name, _ in model.rows}) == 1:
        return [f"turn {position}"]
    return [f"turn {position} of ", isolated((agent or "no agent named")[:_MOST_OF_NAME])]


def _grid(model: GroupModel) -> Element:
    """A table: one column per sibling, one row per turn."""
    corner = element("th", "turn", scope="col", class_="l")
    heads = [element("th", *_head(sibling, model), scope="col", class_="l") for sibling in model.siblings]
    rows = [
        element(
            "tr",
            element("th", *_turn_name(model.rows[row], model), scope="row"),
            *(element("td", *_cell(sibling, sibling.cells[column])) for sibling in model.siblings),
        )
        for column, row in enumerate(model.shown)
    ]
    grid = element(
        "table",
        element("caption", "siblings side by side; the text before an answer is what the environment added"),
        element("thead", element("tr", corner, *heads)),
        element("tbody", *rows),
        class_="siblings",
    )
    return element("div", grid, class_="scroll", tabindex=0, role="region", aria_label="siblings side by side")


def _head(sibling: Sibling, model: GroupModel) -> list[Child]:
    account = sibling.account
    verdict = element("div", f"not compared: {account.reason}", class_="bad") if account.reason else None
    reference: Child = (
        element("div", "the others are compared with this one", class_="note")
        if sibling.is_reference
        else element(
            "div",
            link(model.params.link(against=f"{account.rollout_id}:{account.attempt}"), "compare with this one"),
            class_="note",
        )
    )
    return [
        element("div", link(model.links.rollout(account.rollout_id, account.attempt), account.rollout_id[:12])),
        element("div", f"R = {number(account.credit.reward)}", class_="reward"),
        element("div", f"A = {_advantages(account)}"),
        verdict,
        element(
            "div",
            isolated(account.status or "not ended"),
            f", {len(account.calls)} call{'' if len(account.calls) == 1 else 's'}, {seconds(account.seconds)}",
            class_="note",
        ),
        reference,
        element("div", "departs at ", *_departure(sibling.divergence, model), class_="warn")
        if sibling.divergence
        else None,
    ]


def _advantages(account: RolloutAccount) -> str:
    """The advantages of its trained calls, equal ones once."""
    advantages = list(dict.fromkeys(number(call.advantage) for call in account.calls if call.reason is None))
    if not advantages:
        reasons = dict.fromkeys(call.reason or "" for call in account.calls)
        return f"– ({', '.join(list(reasons)[:3]) or 'no calls'})"
    return ", ".join(advantages[:6]) + (" …" if len(advantages) > 6 else "")


def _cell(sibling: Sibling, cell: Cell | None) -> list[Child]:
    if cell is None:
        return [element("span", "–", class_="note")]
    account, call = sibling.account, cell.call
    kind = shade(call.advantage, account.credit.greatest, trained=call.reason is None)
    verdict = f"A = {number(call.advantage)}" if call.reason is None else call.reason
    answer: list[Child] = []
    if cell.same.head or cell.same.left_out:
        answer.append(element("span", *text_parts(cell.same), class_="same"))
    if cell.state == "here" and sibling.divergence is not None and sibling.divergence.part == "answer":
        answer.append(element("mark", "◆", title=f"departs: {sibling.divergence.was} became {sibling.divergence.now}"))
    answer += text_parts(cell.answer)
    departs: Child = None
    if cell.state == "here" and sibling.divergence is not None and sibling.divergence.part == "prompt":
        departs = element(
            "div",
            f"the environment departs at token {sibling.divergence.token}: ",
            isolated(sibling.divergence.was),
            " became ",
            isolated(sibling.divergence.now),
            class_="warn",
        )
    return [
        element("div", f"call {call.index}, {verdict}", class_="note"),
        cut_off(call),
        departs,
        _environment(cell),
        element("pre", *answer, class_=f"answer {kind}{' alike' if cell.state == 'same' else ''}"),
    ]


def _environment(cell: Cell) -> Element | None:
    if cell.prompt_is_same:
        return element("div", "⟨the same prompt as the one compared with⟩", class_="note")
    return element("pre", *text_parts(cell.added), class_="env") if cell.added.head or cell.added.left_out else None


def _pages(model: GroupModel) -> Element | None:
    links: list[Child] = []
    if model.start:
        links.append(link(model.params.link(start=max(model.start - MEMBERS, 0) or None), "earlier rollouts"))
    if model.start + MEMBERS < len(model.group.keys):
        links.append(link(model.params.link(start=model.start + MEMBERS), "more rollouts"))
    if model.shown.start:
        links.append(link(model.params.link(turn=None), "first turns"))
    if model.shown.stop < len(model.rows):
        links.append(link(model.params.link(turn=model.shown.stop), "later turns"))
    return element("p", *links, class_="pages") if links else None
