"""The conversation of a rollout, turn by turn: only what each call added to what an earlier call already held."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainspan_processing.explain.account import CallAccount, ForeignAccount, RolloutAccount, ToolAccount
from trainspan_processing.text.dialects import Message
from trainspan_processing.text.safe_text import visible
from trainspan_processing.text.token_text import Decoder

__all__ = [
    "RecordedMessage",
    "Step",
    "Text",
    "Turn",
    "common_length",
    "ids_text",
    "recorded_messages",
    "shared_lengths",
    "steps_of",
    "text_of",
]

Ids = NDArray[np.int32]

MOST_CHARACTERS: Final = 4_000
"""Characters of one text on a page with several; the page of the call has all of it."""
_MESSAGES: Final = 6
_MESSAGE_CHARACTERS: Final = 600
_EARLIER: Final = 64
"""Number of earlier calls that a prompt is compared with, nearest first."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text, cut in the middle if it is long."""

    head: str
    left_out: int = 0
    """Number of units between head and tail."""
    tail: str = ""
    unit: str = "characters"

    @classmethod
    def of(cls, text: str, most: int = MOST_CHARACTERS) -> "Text":
        weight = _weight(text[: 2 * most])
        if len(text) <= most and weight <= 2 * most:
            return cls(text)
        half = min(len(text), most, max(64, most * most // weight)) // 2
        return cls(text[:half], len(text) - 2 * half, text[-half:])


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A message as the client recorded it."""

    role: str
    text: Text


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the conversation."""

    call: CallAccount
    known: int
    """Prompt tokens that the call `like` already held, as prompt or answer."""
    like: int | None
    """Index of that call."""
    added: Text
    """The text of the other prompt tokens."""
    answer: Text
    messages: list[RecordedMessage]
    """What the client recorded of the request, without the messages that its agent's previous call had too."""
    said_before: int
    """The number of those."""


Step = Turn | ForeignAccount | ToolAccount


def steps_of(account: RolloutAccount, start: int, most: int, decoder: Decoder | None) -> tuple[list[Step], int]:
    """At most `most` steps from number `start`, in the order of their start, and the number of all."""
    steps: list[CallAccount | ForeignAccount | ToolAccount] = [*account.calls, *account.foreign, *account.tools]
    steps.sort(key=lambda step: (step.start_s, -step.index if isinstance(step, CallAccount) else 1))
    page = steps[start : start + most]
    turns = {id(turn.call): turn for turn in _turns(account, page, decoder)}
    return [turns[id(step)] if isinstance(step, CallAccount) else step for step in page], len(steps)


def _weight(text: str) -> int:
    """Bytes that the text takes in a page, about: markup and invisible characters are written as several characters."""
    return len(visible(text).encode()) + 4 * sum(map(text.count, "<>&"))


def _turns(account: RolloutAccount, steps: Sequence[object], decoder: Decoder | None) -> list[Turn]:
    shared = shared_lengths(account.calls)
    before: dict[str | None, list[Message]] = {}
    turns = []
    for call in account.calls:
        if any(call is step for step in steps):
            known, like = shared[call.index]
            earlier = before.get(call.agent, [])
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(call.messages, earlier, strict=False)))
            added, answer = text_of(call.prompt_ids[known:], decoder), text_of(call.completion_ids, decoder)
            turns.append(Turn(call, known, like, added, answer, recorded_messages(call.messages[same:]), same))
        before[call.agent] = call.messages
    return turns


def recorded_messages(messages: Sequence[Message]) -> list[RecordedMessage]:
    """The last messages, with everything other than text as JSON."""
    shown = []
    for message in messages[-_MESSAGES:]:
        content = message.get("content")
        rest = {key: value for key, value in message.items() if key not in ("role", "content", "finish_reason")}
        plain = (
            content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
        )
        text = " ".join(filter(None, (plain, json.dumps(rest, ensure_ascii=False) if rest else "")))
        shown.append(RecordedMessage(str(message.get("role", "?"))[:40], Text.of(text, _MESSAGE_CHARACTERS)))
    return shown


def shared_lengths(calls: Sequence[CallAccount]) -> Mapping[int, tuple[int, int | None]]:
    """Call → the longest beginning of its prompt that an earlier call held, prompt and answer, and that call's index."""
    shared: dict[int, tuple[int, int | None]] = {}
    earlier_calls: list[tuple[int, Ids]] = []
    for call in calls:
        prompt = np.array(call.prompt_ids, dtype=np.int32)
        best: tuple[int, int | None] = (0, None)
        for index, earlier in earlier_calls[: -_EARLIER - 1 : -1]:
            length = common_length(prompt, earlier)
            if length > best[0]:
                best = (length, index)
            if length == len(prompt):
                break
        shared[call.index] = best
        earlier_calls.append((call.index, np.array([*call.prompt_ids, *call.completion_ids], dtype=np.int32)))
    return shared


def common_length(first: Ids, second: Ids) -> int:
    """Number of equal ids at the beginning."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if different.size else length


def ids_text(ids: Sequence[int], decoder: Decoder | None) -> str:
    """The text of the ids, or the ids themselves without a tokenizer."""
    return decoder.text(ids) if decoder is not None else " ".join(map(str, ids))


def text_of(ids: Sequence[int], decoder: Decoder | None, most: int = MOST_CHARACTERS) -> Text:
    """The text of the ids. Of a long one, both ends of about `most` characters in total, cut between tokens."""
    if len(ids) <= most:
        whole = ids_text(ids, decoder)
        if not Text.of(whole, most).left_out:
            return Text(whole)
    length = min(len(ids), most) // 2
    while length > 0:
        ends = [ids_text(part, decoder) for part in (ids[:length], ids[-length:])]
        # A page has room for `most` characters that are written as about two bytes each.
        size = max(max(len(end), _weight(end[: 2 * most]) // 2) for end in ends)
        if size <= most // 2:
            return Text(ends[0], len(ids) - 2 * length, ends[1], "tokens")
        length = min(length - 1, length * (most // 2) // size)
    return Text("", len(ids), "", "tokens") if len(ids) > 1 else Text.of(ids_text(ids, decoder), most)
