"""The page of one rollout, and the same as a file without a server (`trainspan explain --html`)."""

from collections.abc import Callable
from urllib.parse import quote

from trainspan_processing.explain.account import RolloutAccount
from trainspan_viewer.html.document import Page, standalone
from trainspan_viewer.html.elements import Child, Element, element, link
from trainspan_viewer.html.formats import count, short_id
from trainspan_viewer.pages.rollout.branches import branch_facts, branches, measurements
from trainspan_viewer.pages.rollout.conversation import advantage_legend, conversation
from trainspan_viewer.pages.rollout.facts import derivation, edges, facts, members, shown_calls
from trainspan_viewer.pages.rollout.timeline import timeline
from trainspan_viewer.pages.rollout.what_if import what_if_part
from trainspan_viewer.queries.addresses import dataset_address
from trainspan_viewer.queries.rollout.conversation import steps_of
from trainspan_viewer.queries.rollout.explained import decoder_of
from trainspan_viewer.queries.rollout.large import LargePart
from trainspan_viewer.queries.rollout.rollout import STEPS, RolloutModel

__all__ = ["explanation_page", "render_rollout"]

_MOST_TOKENS = 20_000
"""Up to this many trained tokens in a file, each token gets its own element."""


def render_rollout(model: RolloutModel) -> Page:
    account, links = model.account, model.links
    key = (account.rollout_id, account.attempt)
    by = model.links.dataset
    explained: Child = link(dataset_address(by), by) if by else "the store as it is now"
    body: list[Child] = [
        facts(
            account,
            ("id", _copied(account.rollout_id)),
            ("explained by", explained),
            origin=branch_facts(account, links.elsewhere),
            part=model.part,
        ),
        element(
            "p",
            link(links.group(*key), f"side by side with its group of {len(account.credit.members) or 1}")
            if model.part is None
            else None,
            link(links.spans(*key), "raw spans"),
            *(
                link(links.rollout(*key, dataset=other.name), f"explained by policy {other.policy}")
                for other in model.of_policies
            ),
            class_="pages",
        ),
        *(
            _sections(account, lambda index: links.call(*key, index))
            if model.part is None
            else _sections_of_part(model.part)
        ),
        members(account.credit, links.rollout),
        branches(account, links.elsewhere),
        what_if_part(model.what_if, model.params, links, key) if model.what_if is not None else None,
        element("h2", "Conversation"),
        _pages(model) if model.part is not None else None,
        advantage_legend(account),
        *conversation(account, model.steps, links, is_part=model.part is not None),
        _pages(model),
    ]
    crumbs = []
    if account.run_id:
        crumbs.append((account.run_id, f"/runs/{quote(account.run_id, safe='')}"))
    if by:
        crumbs.append((by.rpartition(":")[2], dataset_address(by)))
    is_running = account.status is None
    content: list[Child] = [element("div", *body, id="live")] if is_running else body
    live = model.params.link() if is_running else None
    return Page(f"Rollout {short_id(account.rollout_id)}", content, section="datasets", crumbs=crumbs, live=live)


def explanation_page(account: RolloutAccount) -> str:
    """A file with everything about the rollout; it loads nothing and contains no script."""
    steps, _ = steps_of(account, 0, 10**6, decoder_of(account))
    in_full = sum(len(call.completion_ids) for call in account.calls) <= _MOST_TOKENS
    body: list[Child] = [
        facts(account, ("id", account.rollout_id), origin=branch_facts(account, None)),
        *_sections(account, lambda index: f"#call-{index}"),
        members(account.credit, None),
        branches(account, None),
        element("h2", "Conversation"),
        advantage_legend(account),
        *conversation(account, steps, None, in_full=in_full),
    ]
    return standalone(Page(f"Rollout {short_id(account.rollout_id)}", body))


def _copied(rollout_id: str) -> Element:
    """The id cut, with a button that copies all of it."""
    button = element("button", "copy", type="button", data_copy=rollout_id, aria_label="copy the whole id")
    return element("span", element("code", short_id(rollout_id), title=rollout_id), " ", button)


def _sections(account: RolloutAccount, call: Callable[[int], str]) -> list[Child]:
    return [
        element("h2", "Timeline"),
        timeline(account),
        element("h2", "Rewards"),
        edges(account.edges, call),
        *measurements(account, call),
        element("h2", "Credit"),
        derivation(account.credit),
    ]


def _sections_of_part(part: LargePart) -> list[Child]:
    """What is not derived, and the timeline of the calls on the page."""
    account = part.account
    shown = shown_calls(part)
    explain = f"`trainspan explain {account.rollout_id}` derives them without this limit."
    of_dataset = (
        "Advantages are those of the dataset's rows. " if any(call.reason is None for call in account.calls) else ""
    )
    why = (
        f"{part.why}. So this page reads only {shown}, and leaves out rewards, measured values, derivation, tool steps and what "
        "clients recorded."
    )
    return [
        element("p", why, class_="warn", role="status"),
        element("p", f"{of_dataset}{explain}", class_="note"),
        element("h2", "Timeline"),
        element("p", f"{shown}, from the start of the rollout", class_="note"),
        timeline(account),
    ]


def _pages(model: RolloutModel) -> Element | None:
    if model.n_steps <= STEPS and model.part is None:
        return None
    end = min(model.start + (STEPS if model.part is None else len(model.steps)), model.n_steps)
    what = "steps" if model.part is None else "calls"
    last = (model.n_steps - 1) // STEPS * STEPS
    shown = (
        shown_calls(model.part)
        if model.part
        else f"steps {count(model.start + 1)} to {count(end)} of {count(model.n_steps)}"
    )
    return element(
        "p",
        link(model.params.link(start=None), f"first {what}") if model.part and model.start else None,
        link(model.params.link(start=max(model.start - STEPS, 0) or None), f"earlier {what}") if model.start else None,
        shown,
        link(model.params.link(start=end), f"later {what}") if end < model.n_steps and model.steps else None,
        link(model.params.link(start=last), f"last {what}") if model.part and model.start < last else None,
        class_="pages",
    )
