"""The page of a group: siblings side by side, turn by turn, and where each departs from the one that it is compared with."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import polars as pl

from trainspan_processing.credit.groups import with_groups
from trainspan_processing.dataset.published import open_published
from trainspan_processing.explain.account import CallAccount, RolloutAccount
from trainspan_processing.explain.explain import GroupAccount
from trainspan_processing.reasons.reason_counts import NO_ROLLOUT
from trainspan_processing.text.token_text import Decoder
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError
from trainspan_viewer.queries.requests.explain_request import ExplainRequest
from trainspan_viewer.queries.requests.limits import NotDerivedError, Size
from trainspan_viewer.queries.requests.links import Links
from trainspan_viewer.queries.rollout.alignment import (
    SiblingDivergence,
    Turn,
    align,
    by_turn,
    earliest,
    first_divergence,
)
from trainspan_viewer.queries.rollout.conversation import Text, ids_text, shared_lengths, text_of
from trainspan_viewer.queries.rollout.explained import (
    MEMBERS,
    account_of,
    changed_group_of,
    decoder_of,
    group_of,
    request_of,
)
from trainspan_viewer.queries.rollout.what_if import WhatIf, what_if
from trainspan_viewer.queries.sources import Sources

__all__ = ["Cell", "GroupModel", "LargeGroup", "Sibling", "find_contradiction", "load_group"]

_TURNS: Final = 20
"""Rows on one page."""
_MOST_CHARACTERS: Final = 1_200
_END: Final = 40
"""Tokens of an answer that a contradiction quotes."""
_MOST_COMPARED: Final = 4_000
_TURN_END: Final = re.compile(r"<\|[^|<>\s]{1,40}\|>|</s>")
"""Special tokens that end an answer."""
_IGNORED: Final = str.maketrans(dict.fromkeys(".,;:!?…\"'`´‘’“”„()[]{}*_#", " "))
"""Punctuation; not the signs of mathematics, which change a meaning."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One turn of one sibling."""

    call: CallAccount
    prompt_is_same: bool
    """Whether the prompt has the same tokens as the reference's in this turn; False for the reference itself."""
    added: Text
    """What the environment added."""
    same: Text
    """The beginning of the answer, up to the first divergence if it is in this answer; else nothing."""
    answer: Text
    """The answer, after `same`."""
    state: str
    """`same` before the divergence, `here` at it, `after` it; `reference` in the rollout that is compared with."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """A column."""

    account: RolloutAccount
    is_reference: bool
    divergence: SiblingDivergence | None
    """None for the reference, and if the rollouts are equal."""
    cells: list[Cell | None]
    """One per row of the page; None if it has no such turn."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two rollouts whose answers differ at most in case, spaces and punctuation, and whose rewards differ."""

    better: RolloutAccount
    worse: RolloutAccount
    answers: tuple[str, str]
    """The last answer of each, shortened."""


@dataclass(frozen=True, slots=True)
class GroupModel:
    """The siblings from number `start` of all `keys`, a column for each and a row for each turn of an agent."""

    group: GroupAccount
    siblings: list[Sibling]
    reference: RolloutAccount
    """The rollout that the others are compared with; it may be on another page."""
    rows: list[Turn]
    """All of them."""
    shown: range
    """The rows on the page."""
    start: int
    common: SiblingDivergence | None
    """The first divergence of any sibling."""
    contradiction: Contradiction | None
    """A sign of a wrong judge, among the siblings on the page."""
    what_if: WhatIf
    links: Links
    params: Params
    dataset: str | None


@dataclass(frozen=True, slots=True)
class LargeGroup:
    """A group that is too large to be put side by side."""

    why: str
    largest: Sequence[Size]
    """The rollouts with the most spans, as far as they were counted."""
    links: Links


def load_group(sources: Sources, params: Params) -> GroupModel | LargeGroup:
    """The group of `dataset` and `group`, or of `rollout`. Raises NotFoundError if there is none."""
    dataset, rollout = params.path.get("dataset", ""), params.text("rollout")
    if dataset:
        rollout = _member(sources, dataset, params.text("group"))
    request = request_of(sources, params, rollout, dataset)
    try:
        return _side_by_side(request, params)
    except NotDerivedError as error:
        return LargeGroup(str(error), error.largest, Links(request.location.name if request.location else None))


def _side_by_side(request: ExplainRequest, params: Params) -> GroupModel:
    start = MEMBERS * (params.integer("start", 0, most=10**6) // MEMBERS)
    answer = what_if(request, start=start)
    group = changed_group_of(request, start=start)[0] if answer.group else group_of(request, start=start)
    if not group.rollouts:
        raise NotFoundError(f"the group has {len(group.keys)} rollouts: none from number {start}")
    reference = _reference(request, group, params.text("against"))
    rows = align([reference.calls, *(rollout.calls for rollout in group.rollouts)])
    first = min(params.integer("turn", 0, most=10**6), max(len(rows) - 1, 0)) // _TURNS * _TURNS
    shown = range(first, min(first + _TURNS, len(rows)))
    decoder = decoder_of(next((rollout for rollout in group.rollouts if rollout.decoded_with), group.rollouts[0]))
    siblings = [_sibling(rollout, reference, rows, shown, decoder) for rollout in group.rollouts]
    siblings.sort(key=lambda sibling: not sibling.is_reference)  # its column has the prompts
    departures = [sibling.divergence for sibling in siblings if sibling.divergence is not None]
    return GroupModel(
        group=group,
        siblings=siblings,
        reference=reference,
        rows=rows,
        shown=shown,
        start=start,
        common=earliest(departures),
        contradiction=find_contradiction(group.rollouts, decoder),
        what_if=answer,
        links=Links(request.location.name if request.location else None),
        params=params,
        dataset=request.location.name if request.location else None,
    )


def _member(sources: Sources, dataset: str, group_id: str) -> str:
    """A rollout of the group, from the dataset's rows, or from its ledger if none of its rollouts gave a row."""
    published = open_published(sources.paths.dataset(dataset).path)
    rows = published.rows([pl.col("group_id"), pl.col("rollout_id")]).filter(pl.col("group_id") == group_id)
    if rows.height:
        return str(rows["rollout_id"][0])
    seen = published.seen().filter(~pl.col("rollout_id").str.starts_with(NO_ROLLOUT) & pl.col("task_id").is_not_null())
    nothing = pl.DataFrame(schema={"rollout_id": pl.String, "attempt": pl.Int32, "prompt_hash": pl.String})
    group = with_groups(seen, nothing).filter(pl.col("group_id") == group_id)
    if group.is_empty():
        raise NotFoundError(f"no group {group_id[:80]!r} in {dataset}")
    return str(group["rollout_id"][0])


def _reference(request: ExplainRequest, group: GroupAccount, wanted: str) -> RolloutAccount:
    """The rollout asked for as ID:ATTEMPT, else the one with the greatest reward of all; it may be on another page."""
    name, _, number = wanted.rpartition(":")
    rewards = {
        (member.rollout_id, member.attempt): member.reward
        for rollout in group.rollouts
        for member in rollout.credit.members
        if member.reward is not None and member.calls
    }
    rewards |= {
        (rollout.rollout_id, rollout.attempt): rollout.credit.reward
        for rollout in group.rollouts
        if rollout.credit.reward is not None and rollout.calls
    }
    best = max((key for key in group.keys if key in rewards), key=lambda key: rewards[key], default=None)
    chosen = next(
        (key for key in group.keys if key == (name, int(number) if number.isdecimal() and len(number) < 10 else 0)),
        best,
    )
    if chosen is None:
        return max(group.rollouts, key=lambda rollout: len(rollout.calls) > 0)
    shown = next((rollout for rollout in group.rollouts if (rollout.rollout_id, rollout.attempt) == chosen), None)
    question = replace(request.question, rollout=chosen[0], attempt=chosen[1])
    return shown or account_of(replace(request, question=question))


def _sibling(
    account: RolloutAccount, reference: RolloutAccount, rows: Sequence[Turn], shown: range, decoder: Decoder | None
) -> Sibling:
    is_reference = account is reference
    divergence = None if is_reference else first_divergence(rows, reference.calls, account.calls, decoder)
    shared, calls = shared_lengths(account.calls), by_turn(account.calls)
    cells: list[Cell | None] = []
    for row in shown:
        call = calls.get(rows[row])
        if call is None:
            cells.append(None)
            continue
        state = _state(divergence, row, is_reference=is_reference)
        split = divergence.token if divergence and state == "here" and divergence.part == "answer" else 0
        prompt_is_same = state == "same" or (state == "here" and divergence is not None and divergence.part == "answer")
        cells.append(
            Cell(
                call,
                prompt_is_same,
                text_of(call.prompt_ids[shared[call.index][0] :], decoder, _MOST_CHARACTERS),
                text_of(call.completion_ids[:split], decoder, _MOST_CHARACTERS),
                text_of(call.completion_ids[split:], decoder, _MOST_CHARACTERS),
                state,
            )
        )
    return Sibling(account, is_reference, divergence, cells)


def _state(divergence: SiblingDivergence | None, row: int, *, is_reference: bool) -> str:
    if is_reference:
        return "reference"
    if divergence is None or row < divergence.row:
        return "same"
    return "here" if row == divergence.row else "after"


def find_contradiction(rollouts: Sequence[RolloutAccount], decoder: Decoder | None) -> Contradiction | None:
    """The one with the greatest difference of rewards; None without a tokenizer."""
    if decoder is None:
        return None
    alike: dict[tuple[str, ...], list[RolloutAccount]] = {}
    for rollout in rollouts:
        if rollout.calls and rollout.credit.reward is not None:
            calls = sorted(rollout.calls, key=lambda call: (call.agent or "", call.turn))
            if all(len(call.completion_ids) <= _MOST_COMPARED for call in calls):  # nobody compares longer ones by eye
                alike.setdefault(tuple(_plain(call, decoder) for call in calls), []).append(rollout)
    pairs = [
        (max(some, key=_reward), min(some, key=_reward))
        for words, some in alike.items()
        if any(words) and len(some) > 1
    ]
    better, worse = max(pairs, key=lambda pair: _reward(pair[0]) - _reward(pair[1]), default=(None, None))
    if better is None or worse is None or _reward(better) <= _reward(worse):
        return None
    ends = [ids_text(rollout.calls[-1].completion_ids[-_END:], decoder) for rollout in (better, worse)]
    answers = [_TURN_END.sub("", end).strip() for end in ends]
    return Contradiction(better, worse, (answers[0], answers[1]))


def _reward(rollout: RolloutAccount) -> float:
    return rollout.credit.reward or 0.0


def _plain(call: CallAccount, decoder: Decoder) -> str:
    """An answer without case, spaces and punctuation."""
    text = _TURN_END.sub(" ", ids_text(call.completion_ids, decoder)).casefold()
    return " ".join(text.translate(_IGNORED).split())
