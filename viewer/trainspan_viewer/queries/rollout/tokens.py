"""The tokens of one call with what is known about each: advantage, log-probabilities, entropy, ratio, mask."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainspan_processing.explain.account import CallAccount, RolloutAccount
from trainspan_processing.text.safe_text import visible
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError
from trainspan_viewer.queries.requests.limits import NotDerivedError
from trainspan_viewer.queries.requests.links import Links
from trainspan_viewer.queries.rollout.conversation import Text, shared_lengths, text_of
from trainspan_viewer.queries.rollout.explained import account_of, decoder_of, request_of
from trainspan_viewer.queries.rollout.large import large_part
from trainspan_viewer.queries.rollout.trainer_figures import Figures, Missing, read_figures
from trainspan_viewer.queries.sources import Sources

__all__ = ["MOST_TOKENS", "OVERLAYS", "Overlay", "TokensModel", "load_tokens"]

OVERLAYS: Final = ("advantage", "logprob", "entropy", "mismatch", "ratio", "clip", "mask")
MOST_TOKENS: Final = 16_384
"""On one page."""
_MOST_BYTES: Final = 400_000
"""Text of the tokens on one page."""
_MOST_PROMPT: Final = 20_000
_MOST_SURPRISE: Final = 5.0
"""Nats at which the colors of log-probabilities end: a probability of .7 %."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """One value per token."""

    name: str
    values: Sequence[float | None]
    """(T,) of the tokens on the page."""
    is_signed: bool
    """Whether the sign matters: colors go from negative to positive; else from 0 to `greatest`."""
    greatest: float
    """The end of the color scale."""
    meaning: str


@dataclass(frozen=True, slots=True)
class TokensModel:
    """The tokens from number `start` of one call."""

    account: RolloutAccount
    call: CallAccount
    prompt: Text
    """What the environment added."""
    known: int
    like: int | None
    start: int
    ids: Sequence[int]
    pieces: Sequence[str]
    """(T,) texts, or ids as text without a tokenizer."""
    logprobs: Sequence[float]
    """(T,) of the sampling policy, in nats."""
    overlay: Overlay | None
    """None if it needs figures that are missing."""
    chosen: str
    missing: str | None
    """Why overlays that need the trainer's figures are missing."""
    available: tuple[str, ...]
    links: Links
    params: Params
    n_calls: int | None = None
    """Number of the rollout's calls if it is too large to be derived: `account` then holds only this one."""


def load_tokens(sources: Sources, params: Params) -> TokensModel:
    """Raises NotFoundError if the rollout is not stored or has no such call."""
    request = request_of(sources, params, params.text("rollout"))
    number = params.integer("call", 0, most=10**9)
    part = None
    try:
        account = account_of(request)
    except NotDerivedError as error:
        part = large_part(request, error, start=number, most=1)
        account = part.account
    call = next((call for call in account.calls if call.index == number), None)
    if call is None:
        raise NotFoundError(
            f"rollout {account.rollout_id} has no call {number}: it has {part.n_calls if part else len(account.calls)}"
        )
    decoder = decoder_of(account)
    chosen = params.choice("overlay", OVERLAYS, "advantage")
    start = min(params.integer("start", 0, most=10**9), max(len(call.completion_ids) - 1, 0))
    start = start // 256 * 256
    some = call.completion_ids[start : start + MOST_TOKENS]
    ids, pieces = _bounded(some, decoder.pieces(some) if decoder else [f"{token} " for token in some])
    shown = slice(start, start + len(ids))
    figures = read_figures(sources, request.location, account.rollout_id, account.attempt, call.span_id)
    known, like = shared_lengths(account.calls)[number]
    trained = figures if isinstance(figures, Figures) else None
    return TokensModel(
        account=account,
        call=call,
        prompt=text_of(call.prompt_ids[known:], decoder, _MOST_PROMPT),
        known=known,
        like=like,
        start=start,
        ids=ids,
        pieces=pieces,
        logprobs=call.logprobs[shown],
        overlay=_overlay(chosen, call, account.credit.greatest, trained, shown),
        chosen=chosen,
        missing=figures.why if isinstance(figures, Missing) else None,
        available=OVERLAYS if trained else tuple(name for name in OVERLAYS if name in ("advantage", "logprob", "mask")),
        links=Links.of_request(request),
        params=params,
        n_calls=part.n_calls if part else None,
    )


def _bounded(ids: Sequence[int], pieces: Sequence[str]) -> tuple[Sequence[int], Sequence[str]]:
    """As many tokens as fit on a page."""
    size = 0
    for index, piece in enumerate(pieces):
        size += len(visible(piece).encode()) + 4 * sum(map(piece.count, "<>&"))
        if size > _MOST_BYTES:
            return ids[: max(index // 256 * 256, 256)], pieces[: max(index // 256 * 256, 256)]
    return ids, pieces


def _overlay(name: str, call: CallAccount, greatest: float, figures: Figures | None, part: slice) -> Overlay | None:
    n_tokens = len(call.completion_ids[part])
    if name == "advantage":
        values = [call.advantage if call.reason is None else None] * n_tokens
        return Overlay(
            name, values, True, greatest, "the call's advantage; the scale ends at the greatest of its group"
        )
    if name == "logprob":
        logprobs: list[float | None] = [*call.logprobs[part], *[None] * (n_tokens - len(call.logprobs[part]))]
        meaning = "log-probability by the policy that sampled, in nats"
        return _scaled(name, logprobs, signed=False, meaning=meaning, least=1.0, most=_MOST_SURPRISE)
    if name == "mask":
        trained = 1.0 if call.reason is None else 0.0
        what = "1: trained" if call.reason is None else f"0: not trained, {call.reason}"
        return Overlay(name, [trained] * n_tokens, False, 1.0, f"{what}; prompts are never trained")
    if figures is None:
        return None
    return _of_figures(name, call, figures, part)


def _of_figures(name: str, call: CallAccount, figures: Figures, part: slice) -> Overlay:
    before = f"by the weights before step {figures.step} of {figures.steps} of the round that made {figures.checkpoint}"
    if name == "entropy":
        meaning = f"entropy of the distribution at the token, in nats, {before}"
        return _scaled(name, figures.entropies[part], signed=False, meaning=meaning, least=1.0)
    if name == "mismatch":
        trainer = figures.old_logprobs or figures.trainer_logprobs
        apart = [mine - theirs for mine, theirs in zip(trainer, call.logprobs, strict=False)]
        moved = figures.old_logprobs is None and figures.step > 1
        note = f"; it contains the policy's movement in {figures.step - 1} earlier steps" if moved else ""
        meaning = f"log-probability by the trainer less the server's, in nats{note}"
        return _scaled(name, apart[part], signed=True, meaning=meaning)
    if name == "ratio":
        logs = [math.log(ratio) if ratio > 0 else None for ratio in figures.ratios[part]]
        of = "of the whole call (geometric mean)" if figures.ratio == "call" else "of the token"
        bounds = f", clipped outside {figures.clip[0]:g} to {figures.clip[1]:g}" if figures.clip else ""
        return _scaled(name, logs, signed=True, meaning=f"log of the importance ratio {of} {before}{bounds}")
    meaning = "−1: ratio clipped below with a negative advantage, 1: above with a positive one, 0: not clipped"
    return Overlay(name, [float(sign) for sign in figures.clipped[part]], True, 1.0, meaning)


def _scaled(
    name: str, values: Sequence[float | None], *, signed: bool, meaning: str, least: float = 0.0, most: float = math.inf
) -> Overlay:
    """The scale ends at the greatest value, but not before `least` and not after `most`."""
    present = [abs(value) for value in values if value is not None and math.isfinite(value)]
    return Overlay(name, values, signed, min(max([*present, least]), most), meaning)
