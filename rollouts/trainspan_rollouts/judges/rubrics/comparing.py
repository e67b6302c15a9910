"""A judge model that scores the rollouts of a group against each other, in one request for each vote.

The answers are shown in an order that is drawn for each vote from their content. For a share of the groups the first order is
also shown in reverse: how much more an answer gets when it stands earlier is the position bias.
"""

import math
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import takewhile
from statistics import fmean, stdev
from typing import Any, Final

from trainspan_rollouts.judges.answers import answer_text
from trainspan_rollouts.judges.chat_model import ChatModel
from trainspan_rollouts.judges.judge import JudgeFunction, Result
from trainspan_rollouts.judges.rubrics.rubric import Rubric
from trainspan_rollouts.judges.rubrics.rubric_judge import (
    Scores,
    combined,
    form_of,
    messages_text,
    object_schema,
    of_tools,
    parse_object,
    parse_scores,
    returned_messages,
    schema_of,
    sections,
    system_message,
    task_parts,
)
from trainspan_schemas.telemetry.keys import REWARD

__all__ = ["comparing_judge"]

_MORE: Final = (
    "There are several attempts at the same task. Compare them with each other, and give each of them its own scores: a better attempt "
    "gets a higher score, equally good ones get the same. Their order means nothing."
)

_Verdict = tuple[float | dict[str, float] | None, str | dict[str, str]]


def comparing_judge(rubric: Rubric, model: ChatModel) -> JudgeFunction:
    """The judge of a rubric with `compare = true`."""
    bias = _PositionBias()
    return JudgeFunction(
        str(rubric.file),
        partial(_verdicts, rubric, model, bias),
        rubric.digest,
        compares=True,
        secrets=model.secrets,
        figures=lambda: {**model.figures(), **bias.figures()},
    )


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What the model sees of one rollout; equal ones are shown once."""

    messages: tuple[str, ...]
    answer: str


def _verdicts(
    rubric: Rubric, model: ChatModel, bias: "_PositionBias", task: Mapping[str, Any], results: Sequence[Result]
) -> list[_Verdict]:
    attempts = [_attempt(rubric, result) for result in results]
    distinct = sorted(set(attempts), key=lambda attempt: (attempt.messages, attempt.answer))
    if len(results) == 1:
        return [(None, "nothing to compare: no other rollout of its group ended ok")]
    if len(distinct) == 1:
        return [(0.5, "all attempts of the group are the same") for _ in results]
    drawn = sha256(f"{rubric.options.seed} {distinct!r}".encode(errors="surrogatepass")).hexdigest()
    orders = [_order(f"{drawn} {vote}", len(distinct)) for vote in range(rubric.options.votes)]
    is_reversed = int(drawn[:16], 16) < rubric.options.reverse_share * 2.0**64
    if is_reversed:
        orders.append(orders[0][::-1])
    votes = [_vote(rubric, model, task, distinct, order, vote) for vote, order in enumerate(orders)]
    if is_reversed:
        bias.add(orders[0], *([combined(rubric, [scores])[0][REWARD] for scores in votes[index]] for index in (0, -1)))
    verdicts = {attempt: combined(rubric, [vote[number] for vote in votes]) for number, attempt in enumerate(distinct)}
    return [verdicts[attempt] for attempt in attempts]


def _attempt(rubric: Rubric, result: Result) -> _Attempt:
    sees = rubric.options.sees
    messages: tuple[str, ...] = ()
    if "conversation" in sees or "tools" in sees:
        returned = returned_messages(result)
        seen = returned if "conversation" in sees else of_tools(returned)
        messages = tuple(messages_text([message]) for message in seen)
    return _Attempt(messages, answer_text(result) if "answer" in sees else "")


def _order(seed: str, count: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _vote(
    rubric: Rubric,
    model: ChatModel,
    task: Mapping[str, Any],
    attempts: Sequence[_Attempt],
    order: Sequence[int],
    vote: int,
) -> list[Scores]:
    """Scores of the attempts, which are shown in this order; what all conversations begin with is shown once."""
    names = [f"attempt_{number}" for number in range(1, len(order) + 1)]
    conversations = [attempt.messages for attempt in attempts]
    shared = sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, zip(*conversations, strict=False)))
    parts = task_parts(rubric, task)
    if shared:
        parts["beginning_of_all_attempts"] = "\n".join(conversations[0][:shared])
    for name, number in zip(names, order, strict=True):
        attempt = attempts[number]
        if attempt.messages:
            parts[name] = "\n".join(attempt.messages[shared:])
        if "answer" in rubric.options.sees:
            parts[f"{name}_answer" if attempt.messages else name] = attempt.answer
    form = dict.fromkeys(names[:2], form_of(rubric))
    messages = [system_message(rubric, form, _MORE), {"role": "user", "content": sections(parts)}]
    schema = object_schema(dict.fromkeys(names, schema_of(rubric)))

    def parse(text: str) -> list[Scores]:
        answer = parse_object(text)
        return [parse_scores(rubric, answer.get(name)) for name in names]

    shown = model.answer(messages, schema, vote, parse)
    return [scores for _, scores in sorted(zip(order, shown, strict=True), key=lambda pair: pair[0])]


class _PositionBias:
    """What an answer gains by its place, in groups that were shown in both orders. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gains: list[float] = []

    def add(self, order: Sequence[int], forward: Sequence[float], backward: Sequence[float]) -> None:
        """Adds the mean, over the attempts of a group, of the score in the earlier place minus that in the later one.

        `order` has the attempts by place; scores are from 0 to 1, by attempt. One in the middle has no earlier place.
        """
        half = len(order) // 2
        early = [forward[number] - backward[number] for number in order[:half]]
        late = [backward[number] - forward[number] for number in order[len(order) - half :]]
        with self._lock:
            self._gains.append(fmean([*early, *late]))

    def figures(self) -> dict[str, float]:
        with self._lock:
            gains = list(self._gains)
        if not gains:
            return {}
        bias = {"both_orders": float(len(gains)), "position_bias": fmean(gains)}
        if len(gains) > 1:
            bias["position_bias_error"] = stdev(gains) / math.sqrt(len(gains))
        return bias
