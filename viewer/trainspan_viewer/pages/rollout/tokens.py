"""The page of one call: its tokens under an overlay, with the exact numbers of the token that is pointed at."""

from typing import Final

from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, isolated, link
from trainspan_viewer.html.formats import count, seconds
from trainspan_viewer.pages.rollout.conversation import policy_of, verdict_on
from trainspan_viewer.pages.rollout.marks import joined, legend, level, marks
from trainspan_viewer.pages.rollout.texts import pre
from trainspan_viewer.queries.rollout.tokens import MOST_TOKENS, OVERLAYS, Overlay, TokensModel

__all__ = ["render_tokens"]

_TITLES: Final = {
    "advantage": "advantage",
    "logprob": "log-probability",
    "entropy": "entropy",
    "mismatch": "server–trainer mismatch",
    "ratio": "log ratio",
    "clip": "clip",
    "mask": "mask",
}


def render_tokens(model: TokensModel) -> Page:
    account, call = model.account, model.call
    above = model.links.rollout(account.rollout_id, account.attempt)
    verdict = verdict_on(call)
    sizes = f"{count(len(call.prompt_ids))} prompt tokens · {count(len(call.completion_ids))} sampled"
    about: list[Child] = [
        isolated(call.agent or "no agent named"),
        f" · turn {call.turn} · "
        if model.n_calls is None
        else f" · call {count(call.index + 1)} of {count(model.n_calls)} · ",
        isolated(policy_of(call)),
        f" · {sizes} · {seconds(call.seconds)} · finished: ",
        isolated(call.finish_reason or "–"),
        f" · {verdict}",
    ]
    known = f"⟨{model.known} tokens as in call {model.like}⟩ " if model.known else ""
    body: list[Child] = [
        element("p", *about, class_="note"),
        element("h2", "Prompt"),
        pre(model.prompt, "env", before=known),
        element("h2", "Answer"),
        _section(model),
    ]
    crumbs = [(f"rollout {account.rollout_id[:12]}", above)]
    return Page(f"Call {call.index} of rollout {account.rollout_id}", body, section="datasets", crumbs=crumbs)


def _section(model: TokensModel) -> Element:
    """The part that the script exchanges."""
    overlay = model.overlay
    if overlay is None:
        shown: list[Child] = [element("p", f"No {_TITLES[model.chosen]} here: {model.missing}.", class_="warn")]
    else:
        is_negative = overlay.name == "logprob"
        is_capped = any(value is not None and abs(value) > overlay.greatest for value in overlay.values)
        scale = legend(overlay.greatest, is_signed=overlay.is_signed, is_capped=is_capped, is_negative=is_negative)
        shown = [
            element("p", overlay.meaning, class_="note"),
            scale if overlay.greatest else None,
            element(
                "p",
                "Point at a token, or focus the text and use the arrow keys.",
                class_="note say",
                aria_live="polite",
            ),
            _tokens(model, overlay),
        ]
    note = f"Without {', '.join(_TITLES[name] for name in OVERLAYS if name not in model.available)}: {model.missing}."
    parts: list[Child] = [
        _tabs(model),
        *shown,
        _pages(model),
        element("p", note, class_="note") if model.missing and overlay is not None else None,
        _neighbors(model),
    ]
    return element("section", *parts, id="tokens")


def _tabs(model: TokensModel) -> Element:
    tabs = [
        link(
            model.params.link(overlay=name),
            _TITLES[name],
            aria_current="true" if name == model.chosen else None,
            class_=None if name in model.available else "absent",
        )
        for name in OVERLAYS
    ]
    return element("nav", *tabs, class_="tabs", aria_label="overlay")


def _tokens(model: TokensModel, overlay: Overlay) -> Element:
    kinds = [level(value, overlay.greatest, is_signed=overlay.is_signed) for value in overlay.values]
    kinds += ["u"] * (len(model.pieces) - len(kinds))
    numbers = {
        "data-start": str(model.start),
        "data-ids": joined(model.ids),
        "data-logprobs": joined(model.logprobs),
        "data-name": _TITLES[overlay.name],
        "tabindex": "0",
        "role": "group",
        "aria-label": "tokens of the answer",
    }
    if overlay.name != "logprob":
        same = len(set(overlay.values)) == 1
        numbers["data-values"] = joined(overlay.values[:1] if same else overlay.values)
    return marks(model.pieces, kinds, **numbers)


def _pages(model: TokensModel) -> Element | None:
    end = model.start + len(model.ids)
    total = len(model.call.completion_ids)
    if not model.start and end >= total:
        return None
    before = max(model.start - MOST_TOKENS, 0)
    return element(
        "p",
        link(model.params.link(start=None), "first tokens") if before else None,
        link(model.params.link(start=before or None), "previous tokens") if model.start else None,
        f"tokens {count(model.start + 1)} to {count(end)} of {count(total)}",
        link(model.params.link(start=end), "next tokens") if end < total else None,
        class_="pages",
    )


def _neighbors(model: TokensModel) -> Element:
    account, index = model.account, model.call.index
    indexes = range(model.n_calls) if model.n_calls is not None else [call.index for call in account.calls]
    position = indexes.index(index)
    keep = {"overlay": model.chosen}
    links = [
        link(model.links.call(account.rollout_id, account.attempt, other, **keep), f"{name} call")
        for name, other in (
            ("previous", indexes[position - 1] if position else None),
            ("next", indexes[position + 1] if position + 1 < len(indexes) else None),
        )
        if other is not None
    ]
    return element("p", *links, class_="pages")
