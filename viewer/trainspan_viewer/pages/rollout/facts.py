"""The facts of a rollout, its reward edges with their rules, and the derivation of its advantages in numbers."""

from collections.abc import Callable

from trainspan_processing.explain.account import CreditAccount, EdgeAccount, RolloutAccount
from trainspan_processing.explain.arithmetic import number
from trainspan_viewer.html.elements import Child, Element, element, isolated, link, listed, table
from trainspan_viewer.html.formats import count, seconds

__all__ = ["Address", "derivation", "edges", "facts", "members"]

Address = Callable[[str, int], str]
"""(rollout id, attempt) → the address of its page."""


def facts(account: RolloutAccount, *more: tuple[str, Child]) -> Element:
    """What is known about the rollout as a whole; `more` are further rows."""
    trained = sum(call.reason is None for call in account.calls)
    rows: list[tuple[str, Child]] = [
        ("task", account.task_id or "–"),
        (
            "run, round, attempt",
            element("span", isolated(account.run_id or "–"), f", {count(account.round)}, {account.attempt}"),
        ),
        ("status, split", element("span", *listed([account.status or "not ended", account.split or "–"]))),
        ("duration", seconds(account.seconds)),
        ("reward", number(account.credit.reward)),
        ("calls", f"{len(account.calls) + len(account.foreign)}, of which {trained} trained"),
    ]
    if account.reason:
        rows.append(("not trained because", element("span", account.reason, class_="bad")))
    rows.extend(("missing", f"{lack.what} → {lack.advice}") for lack in account.lacks)
    for one in account.untrained:
        calls = ", ".join(map(str, one.calls[:20])) + (" …" if len(one.calls) > 20 else "")
        told: list[Child] = [one.advice, " (client ", *listed(one.clients), ")"] if one.clients else [one.advice]
        rows.append((f"{one.reason}: calls {calls}", element("span", *told)))
    if account.verdict:
        rows.append(("dataset", element("span", account.verdict, class_="ok" if account.agrees else "bad")))
    decoded = f"decoded with {account.decoded_with}" if account.decoded_with else "token ids: no tokenizer found"
    rows.extend([("text", decoded), *more])
    body = [element("div", element("dt", name), element("dd", value)) for name, value in rows]
    return element("dl", *body, class_="facts")


def edges(found: list[EdgeAccount], address: Callable[[int], str]) -> Element:
    """Every evaluation with the rule that bound it, or why it does not count; `address` is that of a call by its index."""
    if not found:
        return element("p", "This rollout has no rewards.", class_="note")
    rows: list[list[Child]] = [
        [
            number(edge.score),
            edge.name,
            edge.source,
            "–" if edge.at_s is None else f"{edge.at_s:.3f} s",
            edge.on or "–",
            edge.rule or element("span", "does not count", class_="warn"),
            "–"
            if edge.rule is None
            else "rollout"
            if edge.call is None
            else link(address(edge.call), f"call {edge.call}"),
            edge.why,
        ]
        for edge in found[:200]
    ]
    head = ["score", "name", "from", "at", "recorded on", "rule", "falls on", "because"]
    listed = table(
        head,
        rows,
        text=frozenset({1, 2, 4, 5, 6, 7}),
        caption="evaluations in the order of time, those that do not count last",
    )
    return element("div", listed, class_="edges")


def derivation(credit: CreditAccount) -> Element:
    """The computation of the advantages, line by line, as `trainspan explain` prints it."""
    return element("ol", *(element("li", line) for line in credit.lines), class_="sum")


def members(credit: CreditAccount, address: Address | None, *, is_open: bool = False) -> Element | None:
    """The compared group; with `address`, each rollout is a link."""
    if not credit.members:
        return None
    shown = credit.members[:100]
    rows: list[list[Child]] = [
        [
            link(address(one.rollout_id, one.attempt), one.rollout_id) if address else one.rollout_id,
            one.attempt,
            number(one.reward),
            one.calls,
        ]
        for one in shown
    ]
    this = next((place for place, one in enumerate(shown) if one.is_this), -1)
    listed = table(["rollout", "attempt", "R", "calls"], rows, this=this, caption="rollouts compared with each other")
    return element("details", element("summary", f"its group: {len(credit.members)} rollouts"), listed, open=is_open)
