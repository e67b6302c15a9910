"""The facts of a rollout, its reward edges with their rules, and the derivation of its advantages in numbers."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from trainspan_processing.explain.account import CreditAccount, EdgeAccount, RolloutAccount
from trainspan_processing.explain.arithmetic import number
from trainspan_viewer.html.elements import Child, Element, element, isolated, link, listed, table
from trainspan_viewer.html.formats import count, cut, seconds
from trainspan_viewer.queries.rollout.large import LargePart

__all__ = ["Address", "derivation", "edges", "facts", "members", "shown_calls"]

_MOST_CLIENTS: Final = 20
_MOST_LACKS: Final = 50
_MOST_LINES: Final = 500
"""Lines of a derivation; each may have 2,000 characters, so they are bounded together, too."""
_MOST_CHARACTERS: Final = 100_000
_MOST_EDGES: Final = 200

Address = Callable[[str, int], str]
"""(rollout id, attempt) → the address of its page."""


def shown_calls(part: LargePart) -> str:
    """Which calls a page has, in words."""
    n_shown = len(part.account.calls)
    if not n_shown:
        return f"none of {count(part.n_calls)} calls"
    return f"calls {count(part.start + 1)}–{count(part.start + n_shown)} of {count(part.n_calls)}"


def facts(
    account: RolloutAccount,
    *more: tuple[str, Child],
    origin: Sequence[tuple[str, Child]] = (),
    part: LargePart | None = None,
) -> Element:
    """What is known about the rollout as a whole; `more` are further rows, and `origin` those of a branch.

    With `part`, the account has only some calls.
    """
    trained = sum(call.reason is None for call in account.calls)
    n_calls = f"{len(account.calls) + len(account.foreign)}, of which {trained} trained"
    rows: list[tuple[str, Child]] = [
        ("task", account.task_id or "–"),
        *origin,
        (
            "run, round, attempt",
            element("span", isolated(account.run_id or "–"), f", {count(account.round)}, {account.attempt}"),
        ),
        ("status, split", element("span", *listed([account.status or "not ended", account.split or "–"]))),
        ("duration", seconds(account.seconds)),
        ("reward", number(account.credit.reward)),
        ("calls", n_calls if part is None else f"{count(part.n_calls)}, with tokens"),
    ]
    if account.answer is not None:
        rows.append(("answer of the task", element("span", isolated(cut(account.answer)))))
    if account.error:
        rows.append(("failed because", element("span", isolated(cut(account.error)), class_="bad")))
    if account.reason:
        rows.append(("not trained because", element("span", account.reason, class_="bad")))
    rows.extend(("missing", f"{lack.what} → {lack.advice}") for lack in account.lacks[:_MOST_LACKS])
    if len(account.lacks) > _MOST_LACKS:
        rows.append(("missing", f"{count(len(account.lacks) - _MOST_LACKS)} more"))
    for group in account.untrained:
        calls = ", ".join(map(str, group.calls[:20])) + (" …" if len(group.calls) > 20 else "")
        advice: list[Child] = [group.advice]
        if group.clients:
            clients = listed(group.clients[:_MOST_CLIENTS])
            advice = [group.advice, " (client ", *clients, _more(len(group.clients) - _MOST_CLIENTS), ")"]
        rows.append((f"{group.reason}: calls {calls}", element("span", *advice)))
    if account.verdict:
        rows.append(("dataset", element("span", account.verdict, class_="ok" if account.agrees else "bad")))
    decoded = f"decoded with {account.decoded_with}" if account.decoded_with else "token ids: no tokenizer found"
    rows.extend([("text", decoded), *more])
    body = [element("div", element("dt", name), element("dd", value)) for name, value in rows]
    return element("dl", *body, class_="facts")


def edges(evaluations: list[EdgeAccount], address: Callable[[int], str]) -> Element:
    """Every evaluation with the rule that bound it, or why it does not count; `address` is that of a call by its index."""
    if not evaluations:
        return element("p", "This rollout has no rewards.", class_="note")
    rows: list[list[Child]] = [
        [
            number(edge.score),
            cut(edge.name),
            cut(edge.source),
            "–" if edge.at_s is None else f"{edge.at_s:.3f} s",
            cut(edge.on or "–"),
            edge.rule or element("span", "does not count", class_="warn"),
            "–"
            if edge.rule is None
            else "rollout"
            if edge.call is None
            else link(address(edge.call), f"call {edge.call}"),
            edge.why,
            cut(edge.explanation or "–"),
        ]
        for edge in evaluations[:_MOST_EDGES]
    ]
    head = ["score", "name", "from", "at", "recorded on", "rule", "falls on", "because", "explanation"]
    listed = table(
        head,
        rows,
        text=frozenset({1, 2, 4, 5, 6, 7, 8}),
        caption="evaluations in the order of time, those that do not count last"
        + (f"; 1–{count(len(rows))} of {count(len(evaluations))}" if len(rows) < len(evaluations) else ""),
    )
    return element("div", listed, class_="edges")


def derivation(credit: CreditAccount) -> Element:
    """The computation of the advantages, line by line, as `trainspan explain` prints it."""
    lines = credit.lines[:_MOST_LINES]
    sizes = accumulate(min(len(line), 2_000) for line in lines)
    lines = lines[: max(sum(size <= _MOST_CHARACTERS for size in sizes), 1)]
    listed = element("ol", *(element("li", line) for line in lines), class_="sum")
    if len(lines) == len(credit.lines):
        return listed
    shown_part = f"lines 1–{count(len(lines))} of {count(len(credit.lines))}; `trainspan explain` prints all"
    return element("div", listed, element("p", shown_part, class_="note"))


def members(credit: CreditAccount, address: Address | None, *, is_open: bool = False) -> Element | None:
    """The compared group; with `address`, each rollout is a link."""
    if not credit.members:
        return None
    shown = credit.members[:100]
    rows: list[list[Child]] = [
        [
            link(address(member.rollout_id, member.attempt), member.rollout_id) if address else member.rollout_id,
            member.attempt,
            number(member.reward),
            member.calls,
        ]
        for member in shown
    ]
    this = next((index for index, member in enumerate(shown) if member.is_this), -1)
    caption = "rollouts compared with each other"
    if len(shown) < len(credit.members):
        caption += f"; 1–{len(shown)} of {count(len(credit.members))}"
    listed = table(["rollout", "attempt", "R", "calls"], rows, this=this, caption=caption)
    return element("details", element("summary", f"its group: {len(credit.members)} rollouts"), listed, open=is_open)


def _more(left: int) -> str:
    return f" and {count(left)} more" if left > 0 else ""
