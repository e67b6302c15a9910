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


def measurements(account: RolloutAccount, address: Callable[[int], str]) -> list[Child]:
    """The newest measurement of each call, under a heading; nothing if no call was measured."""
    rows = [_row(call, address, has_branches=bool(account.branches)) for call in account.calls if call.measured]
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
    listed_calls = table(head, rows, text=frozenset({0, 5, 7, 8}), caption=caption)
    return [element("h2", "Measured by branches"), element("div", listed_calls, class_="measured")]


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
            f"call {branch.call if index is None else index}",
            _branch(branch, address),
            isolated(branch.run_id or "–"),
            branch.status or "–",
            number(branch.reward),
        ]
        for index, branch in shown
    ]
    caption = "rollouts that repeat this one up to a call, then sample"
    if len(shown) < len(account.branches):
        caption += f"; 1–{count(len(shown))} of {count(len(account.branches))}"
    head = ["before", "rollout", "run", "status", "R"]
    rows_shown = table(head, rows, text=frozenset({0, 1, 2, 3}), caption=caption)
    n_branches = len(account.branches)
    summary = element("summary", f"its branches: {count(n_branches)} rollout{'' if n_branches == 1 else 's'}")
    # A link to an element within closed details opens them.
    return element("details", summary, element("div", rows_shown, id="branches"))


def _row(call: CallAccount, address: Callable[[int], str], *, has_branches: bool) -> list[Child]:
    newest = call.measured[0]
    run, more = run_of_branches(call.measured)
    return [
        link(address(call.index), f"call {call.index}"),
        number(newest.advantage.score if newest.advantage else None),
        interval(newest.advantage),
        number(newest.value.score if newest.value else None),
        interval(newest.value),
        link("#branches", newest.source) if has_branches and not newest.is_start else newest.source,
        "–" if newest.diverged is None else newest.diverged,
        element("span", *(listed(newest.policies[:_MOST_POLICIES]) or ["–"])),
        element("span", isolated(run), more),
    ]


def _branch(branch: StoredBranch, address: Elsewhere | None) -> Element:
    name = f"{branch.rollout_id}, attempt {branch.attempt}" if branch.attempt else branch.rollout_id
    return link(address(branch.rollout_id, branch.attempt, None), name) if address else isolated(name)
