"""Conversations as training rows: answers that continue one another share a row, and some rows are held out."""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainspan_training.sft.data.examples import THOUGHTS, Example, Message
from trainspan_training.sft.data.rendering import AnswerTokens, Renderer
from trainspan_training.sft.data.served import PromptComparison

__all__ = ["Conversations", "Row", "hold_out", "make_rows"]

_OPEN_ROWS = 16
"""Rows that a later answer may continue: agents that take turns do not end each other's rows."""
_NAMED = 5
"""Examples named for each reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """T tokens, of which those of the answers are trained."""

    group: str
    """Rows of one group are held out together."""
    tokens: NDArray[np.int32]
    """(T,)"""
    answers: tuple[tuple[int, int], ...]
    """Start, which is never 0, and length of each answer."""

    @property
    def n_trained(self) -> int:
        return sum(size for _, size in self.answers)

    @property
    def labels(self) -> NDArray[np.int32]:
        """(T,) the tokens, and −100 where they are not trained."""
        labels = np.full_like(self.tokens, -100)
        for start, size in self.answers:
            labels[start : start + size] = self.tokens[start : start + size]
        return labels


@dataclass(slots=True)
class Conversations:
    """The rows, and what became of every answer."""

    rows: list[Row] = field(default_factory=list)
    examples: int = 0
    answers: int = 0
    """Answers that are trained."""
    rewritten: int = 0
    """Answers whose prompt does not begin with the tokens of the previous answer, though its messages do."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason → number of answers."""
    named: dict[str, list[str]] = field(default_factory=dict)
    """Reason, or `rewritten` → the first examples that it applies to."""
    comparison: PromptComparison = field(default_factory=PromptComparison)
    """With prompts that the policy server had of the same agent."""
    lacking_tools: int = 0
    """Trained answers whose prompt names none of the tools that are offered."""
    trained_kinds: set[bool] = field(default_factory=set)
    """Whether a trained answer calls tools."""
    dropped_kinds: dict[bool, Counter[str]] = field(default_factory=lambda: {True: Counter(), False: Counter()})
    """The same of a dropped answer → reasons."""

    def drop(self, reason: str, name: str, *, calls_tools: bool | None) -> None:
        """`calls_tools`: None if there is no answer."""
        self.dropped[reason] += 1
        self.name(reason, name)
        if calls_tools is not None:
            self.dropped_kinds[calls_tools][reason] += 1

    def systematic_losses(self) -> list[str]:
        """What the model could not learn from these rows, because no row has it."""
        losses = []
        for calls_tools, what in ((True, "that call tools"), (False, "without tool calls")):
            reasons = self.dropped_kinds[calls_tools]
            if reasons and calls_tools not in self.trained_kinds:
                counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
                losses.append(f"all {reasons.total()} answers {what} are dropped ({counts})")
        if self.lacking_tools:
            losses.append(
                f"the chat template leaves out the tools: {self.lacking_tools} of {self.answers} requests offer some, "
                "their prompts have none"
            )
        return losses

    def name(self, reason: str, name: str) -> None:
        names = self.named.setdefault(reason, [])
        if len(names) < _NAMED and name not in names:
            names.append(name)


@dataclass(slots=True)
class _OpenRow:
    """A row that may still grow."""

    call: AnswerTokens
    """Its last answer."""
    answers: list[tuple[int, int]]
    group: str


@dataclass(slots=True)
class _Talk:
    """A conversation that a later example may continue."""

    messages: Sequence[Message] = ()
    """Its messages so far, without thoughts, which clients do not send back."""
    row: _OpenRow | None = None
    """That of its last answer."""
    group: str = ""
    """Of its first prompt: rows of conversations that begin alike are held out together."""

    def goes_on(self, messages: Sequence[Message]) -> bool:
        return 0 < len(self.messages) < len(messages) and messages[: len(self.messages)] == self.messages


def make_rows(
    examples: Iterable[Example], renderer: Renderer, *, max_length: int, assistant_only: bool = True
) -> Conversations:
    """The training rows of the examples.

    An answer whose prompt begins with exactly the tokens of a recent row continues that row: each token is forwarded
    once. If the template rewrites the history, the answer gets its own row in the same group, which only costs time.
    """
    result = Conversations()
    rows: list[_OpenRow] = []
    recent: deque[_OpenRow] = deque(maxlen=_OPEN_ROWS)
    talks: deque[_Talk] = deque(maxlen=_OPEN_ROWS)
    for example in examples:
        result.examples += 1
        messages = [
            {key: value for key, value in message.items() if key not in THOUGHTS} for message in example.messages
        ]
        talk = next((talk for talk in reversed(talks) if talk.goes_on(messages)), None)
        if talk is None:
            talk = _Talk(group=_first_prompt(example, messages))
            talks.append(talk)
        talk.messages = messages
        for call in _fitting(example, renderer, result, max_length):
            row = next((row for row in recent if _continues(row.call, call)), None)
            if row is None:
                row = _OpenRow(call, [], talk.group)
                rows.append(row)
                recent.append(row)
            if talk.row is not None and row is not talk.row:
                result.rewritten += 1
                result.name("rewritten", example.name)
            row.call = call
            row.answers.append((len(call.prompt), len(call.answer)))
            result.answers += 1
            result.lacking_tools += call.lacks_tools
            talk.row, talk.group = row, row.group
    result.rows = [_closed(row, assistant_only=assistant_only) for row in rows]
    return result


def _first_prompt(example: Example, messages: Sequence[Message]) -> str:
    """A hash of what comes before the first answer, whether that is trained or not."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    prompt = [example.text[0]] if example.text is not None else [*example.tools, *messages[:first]]
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()


def _fitting(example: Example, renderer: Renderer, result: Conversations, max_length: int) -> Iterator[AnswerTokens]:
    kinds: list[bool | None] = [bool(example.messages[index].get("tool_calls")) for index in example.answers] or [None]
    for call, calls_tools in zip(renderer.calls(example), kinds, strict=True):
        if isinstance(call, str):
            result.drop(call, example.name, calls_tools=calls_tools)
        elif call.size <= max_length:
            result.trained_kinds.add(bool(calls_tools))
            yield call
        else:
            result.drop("too_long", example.name, calls_tools=calls_tools)


def _continues(before: AnswerTokens, call: AnswerTokens) -> bool:
    """Whether the call's prompt begins with the tokens of a call before it."""
    asked = len(before.prompt)
    return (
        before.size <= len(call.prompt)
        and np.array_equal(call.prompt[asked : before.size], before.answer)
        and np.array_equal(call.prompt[:asked], before.prompt)
    )


def _closed(row: _OpenRow, *, assistant_only: bool) -> Row:
    tokens = np.concatenate([row.call.prompt, row.call.answer])
    return Row(row.group, tokens, tuple(row.answers) if assistant_only else ((1, len(tokens) - 1),))


def hold_out(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(trained, held out): about this share of the groups is held out, at least one unless the share is 0 or there is only one."""
    groups = list(dict.fromkeys(row.group for row in rows))
    count = min(len(groups) - 1, max(1, round(share * len(groups)))) if share else 0
    chosen = np.random.default_rng([seed, 0]).permutation(len(groups))[: max(0, count)]
    held_out = {groups[index] for index in chosen}
    return [row for row in rows if row.group not in held_out], [row for row in rows if row.group in held_out]
