"""Puts the calls of siblings into rows, by agent and turn, and finds where a rollout first departs from another one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainspan_processing.explain.account import CallAccount
from trainspan_processing.text.token_text import Decoder
from trainspan_viewer.queries.rollout.conversation import common_length, ids_text

__all__ = ["SiblingDivergence", "Turn", "align", "by_turn", "earliest", "first_divergence"]

Turn = tuple[str | None, int]
"""An agent and the number of its call, from 0."""

_BEFORE: Final = 12
"""Equal tokens shown before the one that differs."""


@dataclass(frozen=True, slots=True)
class SiblingDivergence:
    """Where a rollout departs from the reference."""

    row: int
    """Number of the turn among all rows."""
    turn: Turn
    part: str
    """`prompt`: the environment differs; `answer`: the model sampled another token; `absent`: only one of them has this turn."""
    token: int
    """Position in that part from 0."""
    was: str
    """The text of the reference from there on, shortened."""
    now: str


def by_turn(calls: Iterable[CallAccount]) -> dict[Turn, CallAccount]:
    """The calls of one rollout. Further choices of a request come after the rollout's last turn of that agent."""
    turns: dict[Turn, CallAccount] = {}
    more: list[CallAccount] = []
    for call in calls:
        if (call.agent, call.turn) in turns:
            more.append(call)
        else:
            turns[call.agent, call.turn] = call
    for call in more:
        last = max(turn for agent, turn in turns if agent == call.agent)
        turns[call.agent, last + 1] = call
    return turns


def align(rollouts: Iterable[Sequence[CallAccount]]) -> list[Turn]:
    """The turns of all rollouts: those of the first in the order of its calls, further ones after the call before them.

    Agents that run at the same time make their calls in any order, so a turn is known by its agent and not by its place.
    An agent's turns are in their order.
    """
    rows: list[Turn] = []
    for calls in rollouts:
        row_of = {turn: number for number, turn in enumerate(rows)}
        added: dict[int, list[Turn]] = {}
        last = -1
        for turn in by_turn(calls):
            if turn not in row_of:
                last = row_of[turn] = max(last, row_of.get((turn[0], turn[1] - 1), -1))
                added.setdefault(last, []).append(turn)
            last = row_of[turn]
        rows = [*added.get(-1, ()), *(each for at, turn in enumerate(rows) for each in (turn, *added.get(at, ())))]
    return rows


def first_divergence(
    rows: Sequence[Turn], reference: Sequence[CallAccount], calls: Sequence[CallAccount], decoder: Decoder | None = None
) -> SiblingDivergence | None:
    """Where `calls` first differ from the reference, by token ids; None if they are equal."""
    then, now = by_turn(reference), by_turn(calls)
    for row, turn in enumerate(rows):
        call, other = then.get(turn), now.get(turn)
        if call is None and other is None:
            continue
        if call is None or other is None:
            texts = ("no such call", "a call") if call is None else ("a call", "no such call")
            return SiblingDivergence(row, turn, "absent", 0, *texts)
        parts = (("prompt", call.prompt_ids, other.prompt_ids), ("answer", call.completion_ids, other.completion_ids))
        for part, was, is_ in parts:
            if (at := _differs_at(was, is_)) is not None:
                return SiblingDivergence(row, turn, part, at, _excerpt(was, at, decoder), _excerpt(is_, at, decoder))
    return None


def earliest(divergences: Iterable[SiblingDivergence]) -> SiblingDivergence | None:
    """The first one on the page: in a row, a prompt comes before its answer. None if there is none."""
    return min(divergences, key=lambda first: (first.row, first.part != "prompt", first.token), default=None)


def _differs_at(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The position of the first difference; None if there is none."""
    length = common_length(np.array(first, dtype=np.int32), np.array(second, dtype=np.int32))
    return None if length == len(first) == len(second) else length


def _excerpt(ids: Sequence[int], at: int, decoder: Decoder | None) -> str:
    return ids_text(ids[at : at + _BEFORE], decoder) or "nothing"
