"""What branches measured about a rollout's calls, its branches, and what a branch is a branch of."""

from collections.abc import Callable
from typing import Final

from trainspan_processing.branches.stored_branches import StoredBranch
from trainspan_processing.explain.account import CallAccount, RolloutAccount
from trainspan_processing.explain.arithmetic import interval, measured_in_words, number, run_of_branches
from trainspan_viewer.html.elements import Child, Element, element, isolated, link, listed, table
from trainspan_viewer.html.formats import count

__all__ = ["Elsewhere", "branch_facts", "branches", "measured_line", "measurements"]

Elsewhere = Callable[[str, int, int | None], str]
"""(rollout id, attempt, index of a call or None) → the address of its page, explained by whatever explains that rollout."""

_MOST_BRANCHES: Final = 400
_MOST_POLICIES: Final = 8


def branch_facts(account: RolloutAccount, address: Elsewhere | None) -> list[tuple[str, Child]]:
    """Rows of the facts: which call of which rollout it samples anew, and how far it followed that rollout."""
    branch = account.branch
    if branch is None:
        return []
    of = branch.of
    origin: list[Child] = [f"call {of.call}", " of rollout ", isolated(of.rollout_id)]
    if address is not None:
        to_call, to_rollout = address(of.rollout_id, of.attempt, of.call), address(of.rollout_id, of.attempt, None)
        origin = [link(to_call, f"call {of.call}"), " of rollout ", link(to_rollout, isolated(of.rollout_id))]
    if of.attempt:
        origin.append(f", attempt {of.attempt}")
    followed = f"{branch.repeated} repeated from there, {branch.sampled} sampled"
    return [("a branch before", element("span", *origin)), ("its answers", followed)]


def measurements(account: RolloutAccount, call: Callable[[int], str]) -> list[Child]:
    """The newest measurement of each call, under a heading; nothing if no call was measured."""
    rows = [_row(one, call, has_branches=bool(account.branches)) for one in account.calls if one.measured]
    if not rows:
        return []
    head = [
        "call",
        "advantage",
        "95 %",
        "value before it",
        "95 %",
        "mean of",
        "diverged",
        "sampled by",
        "run of branches",
    ]
    caption = "by trainspan branch: differences and means of the rewards of branches, no rewards of this rollout"
    found = table(head, rows, text=frozenset({0, 5, 7, 8}), caption=caption)
    return [element("h2", "Measured by branches"), element("div", found, class_="measured")]


def measured_line(call: CallAccount) -> Element | None:
    """The newest measurement of a call in one line."""
    return element("div", measured_in_words(call.measured[0]), class_="note") if call.measured else None


def branches(account: RolloutAccount, address: Elsewhere | None) -> Element | None:
    """The rollout's branches, by call; None without any."""
    if not account.branches:
        return None
    shown = account.branches[:_MOST_BRANCHES]
    rows: list[list[Child]] = [
        [
            f"call {one.call if index is None else index}",
            _branch(one, address),
            isolated(one.run_id or "–"),
            one.status or "–",
            number(one.reward),
        ]
        for index, one in shown
    ]
    caption = "rollouts that repeat this one up to a call, then sample"
    if len(shown) < len(account.branches):
        caption += f"; 1–{count(len(shown))} of {count(len(account.branches))}"
    found = table(["before", "rollout", "run", "status", "R"], rows, text=frozenset({0, 1, 2, 3}), caption=caption)
    n_branches = len(account.branches)
    summary = element("summary", f"its branches: {count(n_branches)} rollout{'' if n_branches == 1 else 's'}")
    # A link to an element within closed details opens them.
    return element("details", summary, element("div", found, id="branches"))


def _row(call: CallAccount, address: Callable[[int], str], *, has_branches: bool) -> list[Child]:
    one = call.measured[0]
    run, more = run_of_branches(call.measured)
    return [
        link(address(call.index), f"call {call.index}"),
        number(one.advantage.score if one.advantage else None),
        interval(one.advantage),
        number(one.value.score if one.value else None),
        interval(one.value),
        link("#branches", one.source) if has_branches and not one.is_start else one.source,
        "–" if one.diverged is None else one.diverged,
        element("span", *(listed(one.policies[:_MOST_POLICIES]) or ["–"])),
        element("span", isolated(run), more),
    ]


def _branch(one: StoredBranch, address: Elsewhere | None) -> Element:
    named = f"{one.rollout_id}, attempt {one.attempt}" if one.attempt else one.rollout_id
    return link(address(one.rollout_id, one.attempt, None), named) if address else isolated(named)
