"""A rubric as a reward function of stored rollouts: it sees their calls, and its criteria may be about each of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol

from trainspan_rollouts.judges.answers import json_text
from trainspan_rollouts.judges.chat_model import ChatModel
from trainspan_rollouts.judges.rubrics.rubric import Rubric, read_rubric
from trainspan_rollouts.judges.rubrics.rubric_judge import (
    form_of,
    messages_text,
    object_schema,
    parse_object,
    parse_scores,
    properties_of,
    sections,
    system_message,
)
from trainspan_schemas.errors import ConfigError, InvalidRecordError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.keys import REWARD

__all__ = ["stored_rubric"]

_TIMEOUT_S: Final = 120.0
"""How long a busy endpoint is asked again; `[dataset] reward_timeout_s` may end it sooner."""
_ASKS: Final = {"tool_calls", "parts"}
"""Members of a message that ask for tools, which its text does not show."""
_AGENTS: Final = ("main", "sub_agent")
"""Kinds of calls that are work on the task."""
_MORE: Final = (
    "The conversation has the agent's answers with their numbers. These criteria are about each of them, and need an entry with the "
    "number for each: {names}."
)

_Rewards = dict[str, float | list[float | None]]


class Call(Protocol):
    """What is used of a stored call."""

    agent: str | None
    kind: str
    messages: list[JsonObject]
    completion_ids: list[int]

    @property
    def text(self) -> str | None: ...
    @property
    def prompt_text(self) -> str | None: ...


class Tool(Protocol):
    """What is used of a stored tool step."""

    name: str
    arguments: str | None
    result: str | None


class Rollout(Protocol):
    """What is used of a stored rollout."""

    calls: Sequence[Call]
    answer: Any
    tools: Sequence[Tool]


class _StoredRubric:
    """The reward function of a rubric."""

    def __init__(self, rubric: Rubric) -> None:
        self._model = ChatModel(rubric.endpoint, _TIMEOUT_S)
        self._rubric = rubric
        self._of_rollout = tuple(criterion for criterion in rubric.criteria if criterion.of == "rollout")
        self._of_call = tuple(criterion for criterion in rubric.criteria if criterion.of == "call")

    def __call__(self, rollout: Rollout) -> _Rewards | None:
        """Criterion → score from 0 to 1, or a list of them for its calls, and the reward; None without a call of an agent.

        Raises InvalidRecordError if the model's answer does not parse, or if no text of a call is known.
        """
        judged = [number for number, call in enumerate(rollout.calls) if call.kind in _AGENTS]
        if not judged:
            return None
        numbers = range(1, len(judged) + 1)
        more = _MORE.format(names=", ".join(each.name for each in self._of_call)) if self._of_call else ""
        parts = self._parts(rollout, [rollout.calls[number] for number in judged])
        messages = [
            system_message(self._rubric, self._form(), more),
            {"role": "user", "content": sections(parts)},
        ]

        def parse(text: str) -> tuple[dict[str, float], dict[str, list[float]]]:
            return self._parse(parse_object(text), numbers)

        votes = [
            self._model.answer(messages, self._schema(), vote, parse) for vote in range(self._rubric.options.votes)
        ]
        rewards: _Rewards = {
            each.name: self._share(fmean(scores[each.name] for scores, _ in votes)) for each in self._of_rollout
        }
        for each in self._of_call:
            of_calls: list[float | None] = [None] * len(rollout.calls)
            for at, number in enumerate(judged):
                of_calls[number] = self._share(fmean(scores[each.name][at] for _, scores in votes))
            rewards[each.name] = of_calls
        rewards[REWARD] = self._reward(rewards, len(rollout.calls))
        return rewards

    def _reward(self, rewards: Mapping[str, Any], n_calls: int) -> float | list[float | None]:
        """The weighted mean of the rollout's criteria; if all are about calls, that of each call."""
        if self._of_rollout:
            return replace(self._rubric, criteria=self._of_rollout).reward(rewards)
        of_calls = [{each.name: rewards[each.name][number] for each in self._of_call} for number in range(n_calls)]
        return [None if None in scores.values() else self._rubric.reward(scores) for scores in of_calls]

    def _share(self, score: float) -> float:
        return (score - self._rubric.low) / (self._rubric.high - self._rubric.low)

    def _parts(self, rollout: Rollout, calls: Sequence[Call]) -> dict[str, str]:
        """What the model is shown."""
        sees, parts = self._rubric.options.sees, {}
        if "task" in sees and "conversation" not in sees and not self._of_call:
            parts["task"] = _prompt(calls[0], 1)
        if "reference" in sees and rollout.answer is not None:
            parts["reference"] = rollout.answer if isinstance(rollout.answer, str) else json_text(rollout.answer)
        if "conversation" in sees or self._of_call:
            parts["conversation"] = "\n".join(_conversation(calls))
        if "tools" in sees:
            parts["tools"] = "\n".join(f"{tool.name}({tool.arguments or ''}) → {tool.result}" for tool in rollout.tools)
        if "answer" in sees:
            mains = [number for number, call in enumerate(calls, 1) if call.kind == "main"]
            last = mains[-1] if mains else len(calls)
            parts["answer"] = _answer(calls[last - 1], last)
        return parts

    def _form(self) -> JsonObject:
        entry = {"answer": 1, "reason": "why", "score": self._rubric.high}
        of_rollout = form_of(replace(self._rubric, criteria=self._of_rollout))
        return {**of_rollout, **{each.name: [entry] for each in self._of_call}}

    def _schema(self) -> JsonObject:
        of_rollout = properties_of(replace(self._rubric, criteria=self._of_rollout))
        entry = object_schema(
            {"answer": {"type": "integer"}, "reason": {"type": "string"}, "score": {"type": "number"}}
        )
        of_calls = {each.name: {"type": "array", "items": entry} for each in self._of_call}
        return object_schema({**of_rollout, **of_calls})

    def _parse(self, value: Mapping[str, Any], numbers: range) -> tuple[dict[str, float], dict[str, list[float]]]:
        """The scores of the rollout, and those of each call in order. Raises InvalidRecordError."""
        of_rollout = parse_scores(replace(self._rubric, criteria=self._of_rollout), value)
        of_calls: dict[str, list[float]] = {}
        for each in self._of_call:
            given = value.get(each.name)
            entries: list[Any] = given if isinstance(given, list) else []
            by_number = {
                entry.get("answer"): entry
                for entry in entries
                if isinstance(entry, Mapping) and type(entry.get("answer")) is int
            }
            if set(by_number) != set(numbers) or len(entries) != len(numbers):
                raise InvalidRecordError(
                    f"the judge model's answer has not one entry of {each.name} for each of the {len(numbers)} answers: "
                    f"{json_text(given):.200}"
                )
            alone = replace(self._rubric, criteria=(each,))
            of_calls[each.name] = [
                parse_scores(alone, {each.name: by_number[number]})[each.name][0] for number in numbers
            ]
        return {name: score for name, (score, _) in of_rollout.items()}, of_calls


_of_files: Final[dict[tuple[Path, str], _StoredRubric]] = {}
"""By file and digest: chunks of a store share the connection to the cache."""


def stored_rubric(file: Path) -> _StoredRubric:
    """The reward function of the rubric in `file`. Raises ConfigError if it cannot be read, or compares rollouts."""
    rubric = read_rubric(file)
    if rubric.options.compare:
        raise ConfigError(f"{file}: compare = true needs the rollouts of a group together: use it with --judge")
    key = (file.resolve(), rubric.digest)
    return _of_files.get(key) or _of_files.setdefault(key, _StoredRubric(rubric))


def _conversation(calls: Sequence[Call]) -> Iterator[str]:
    """What each request adds to the earlier one that it continues furthest, and the answer with its number."""
    earlier: list[tuple[list[JsonObject], str]] = []
    for number, call in enumerate(calls, 1):
        if not call.messages:
            yield f"[request {number}] {_prompt(call, number)}"
        if added := _added(call.messages, earlier):
            yield messages_text(added)
        answer = _answer(call, number)
        earlier.append((call.messages, answer))
        yield f"[answer {number}{f', agent {call.agent}' if call.agent else ''}] {answer}"


def _added(messages: Sequence[JsonObject], earlier: Sequence[tuple[list[JsonObject], str]]) -> Sequence[JsonObject]:
    """The messages without those of the earlier request, and without its answer."""
    shared, answer = max(((_shared(messages, before), answer) for before, answer in earlier), default=(0, ""))
    added = messages[shared:]
    is_answer = bool(added) and added[0].get("role") == "assistant" and added[0].get("content") == answer
    return added[1:] if shared and is_answer and not set(added[0]) & _ASKS else added


def _shared(messages: Sequence[JsonObject], before: Sequence[JsonObject]) -> int:
    """How many messages both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(messages, before, strict=False)))


def _prompt(call: Call, number: int) -> str:
    text = messages_text(call.messages) if call.messages else call.prompt_text
    if text is None:
        raise _no_text(number)
    return text


def _answer(call: Call, number: int) -> str:
    if call.text is None:
        raise _no_text(number)
    return call.text


def _no_text(number: int) -> InvalidRecordError:
    return InvalidRecordError(
        f"call {number} has no text: no instrumentation recorded it, and the served model's tokenizer is not on this machine"
    )
