"""The verdicts of a grader. What a task or the grader lacks is an error of the judge; what the answer lacks is the lowest score."""

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypedDict

from trainspan_rollouts.judges import child
from trainspan_rollouts.judges.answers import answer_text, conversation, final_answer, json_text
from trainspan_rollouts.judges.chat_model import ChatModel
from trainspan_rollouts.judges.comparisons import parse_json
from trainspan_rollouts.judges.graders.formula import Formula
from trainspan_rollouts.judges.graders.grader_file import (
    Multi,
    Part,
    PythonGrader,
    ScoreModel,
    StringCheck,
    TextSimilarity,
    read_grader,
)
from trainspan_rollouts.judges.graders.templates import MissingInAnswerError, Template
from trainspan_rollouts.judges.judge import JudgeFunction, Result
from trainspan_rollouts.judges.rubrics.rubric_judge import object_schema, parse_object
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.keys import REWARD

__all__ = ["grader_judge"]

_STEP: Final = object_schema({"description": {"type": "string"}, "conclusion": {"type": "string"}})
_SCHEMA: Final = object_schema({"steps": {"type": "array", "items": _STEP}, "result": {"type": "number"}})
"""What a score model answers. Its reasons come first, so that the number follows from them."""

_MOST_ENDS: Final = 12
"""Missing scores: 4,096 combinations."""

_Score = tuple[float, str]
"""A score, and the reason; empty without one."""


class _Sample(TypedDict, total=False):
    output_text: str
    output_json: Any
    output_tools: list[Any]
    """Absent if the agent did not return its messages."""
    choices: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Case:
    """One answer to grade."""

    item: Mapping[str, Any]
    sample: Mapping[str, Any]
    deadline_s: float
    """Of `time.monotonic`."""

    def fill(self, template: Template) -> str:
        return template.fill(self.item, self.sample)

    @property
    def left_s(self) -> float:
        return max(1.0, round(self.deadline_s - time.monotonic(), 1))


def grader_judge(file: Path, timeout_s: float) -> JudgeFunction:
    """The judge of a grader file; a verdict takes `timeout_s` at most. Raises ConfigError."""
    read = read_grader(file)
    parts = read.grader.parts if isinstance(read.grader, Multi) else {"": read.grader}
    models = {name: ChatModel(part.endpoint, timeout_s) for name, part in parts.items() if isinstance(part, ScoreModel)}

    def figures() -> dict[str, float]:
        counted = [model.figures() for model in models.values()]
        return {name: sum(figure[name] for figure in counted) for name in (counted[0] if counted else ())}

    secrets = frozenset[str]().union(*(model.secrets for model in models.values()))
    function = partial(_verdict, read.grader, models, timeout_s)
    return JudgeFunction(str(file), function, read.digest, secrets=secrets, figures=figures)


def _verdict(
    grader: Part | Multi, models: Mapping[str, ChatModel], timeout_s: float, task: Mapping[str, Any], result: Result
) -> Any:
    case = _Case(item_of(task), sample_of(result), time.monotonic() + timeout_s)
    if not isinstance(grader, Multi):
        try:
            score, reason = _graded(grader, models.get(""), case)
        except MissingInAnswerError as error:
            score, reason = _ends(grader)[0], str(error)
        return (score, reason) if reason else score
    graded: dict[str, _Score] = {}
    missing: dict[str, tuple[float, float]] = {}
    for name, part in grader.parts.items():
        try:
            graded[name] = _graded(part, models.get(name), case)
        except MissingInAnswerError as error:
            missing[name] = _ends(part)
            graded[name] = missing[name][0], str(error)
        except InvalidRecordError as error:
            raise InvalidRecordError(f"{name}: {error}") from error
    scores = _lowest(grader.formula, {name: score for name, (score, _) in graded.items()}, missing)
    reasons = {name: reason for name, (_, reason) in graded.items() if reason}
    shown = "; ".join(
        f"{name} {scores[name]:g}" + (f": {reason}" if reason else "") for name, (_, reason) in graded.items()
    )
    return {REWARD: grader.formula.value(scores), **scores}, {REWARD: shown, **reasons}


def _ends(part: Part) -> tuple[float, float]:
    """The lowest and the highest score."""
    return (part.low, part.high) if isinstance(part, ScoreModel) else (0.0, 1.0)


def _lowest(
    formula: Formula, scores: Mapping[str, float], missing: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """`scores` in which the `missing` ones have the ends of their ranges that make the formula lowest.

    With `1 - bad`, an answer at which `bad` cannot look would else earn the most. All ends of up to _MOST_ENDS missing scores are
    tried; of more, those that a search from all lower and from all upper ends comes to. Ends at which the formula has no value do
    not count. Raises InvalidRecordError if it has a value nowhere.
    """
    found: list[tuple[float, dict[str, float]]] = []
    fault: InvalidRecordError | None = None

    def attempt(ends: Mapping[str, float]) -> float:
        nonlocal fault
        chosen = {**scores, **ends}
        try:
            value = formula.value(chosen)
        except InvalidRecordError as error:
            fault = error
            return math.inf
        found.append((value, chosen))
        return value

    if len(missing) <= _MOST_ENDS:
        for corner in itertools.product(*missing.values()):
            attempt(dict(zip(missing, corner, strict=True)))
    else:
        for start in (0, 1):
            ends = {name: both[start] for name, both in missing.items()}
            for name, (low, high) in missing.items():
                ends[name] = low if attempt({**ends, name: low}) <= attempt({**ends, name: high}) else high
    if not found:
        assert fault is not None
        raise fault
    return min(found, key=lambda each: each[0])[1]


def item_of(task: Mapping[str, Any]) -> dict[str, Any]:
    """What `item` stands for: the fields of a fine-tuning row, which are the task's `meta`, and before them the task's own."""
    meta = task.get("meta")
    return {**task, **(meta if isinstance(meta, Mapping) else {})}


def sample_of(result: Result) -> _Sample:
    """What `sample` stands for."""
    text = answer_text(result)
    answer = final_answer(result)
    if isinstance(answer, str):
        try:
            value = parse_json(answer)
        except ValueError:
            value = None
    else:
        value = answer
    message: dict[str, Any] = {"role": "assistant", "content": text}
    sample = _Sample(output_text=text, output_json=value, choices=[{"index": 0, "message": message}])
    messages = conversation(result)
    if messages is not None:
        sample["output_tools"] = message["tool_calls"] = [
            call for each in messages if isinstance(each.get("tool_calls"), list) for call in each["tool_calls"]
        ]
    return sample


def _graded(part: Part, model: ChatModel | None, case: _Case) -> _Score:
    """Raises MissingInAnswerError, InvalidRecordError, ConnectionError."""
    try:
        if isinstance(part, StringCheck):
            return _checked(part, case)
        if isinstance(part, TextSimilarity):
            payload = {"metric": part.metric, "text": case.fill(part.text), "reference": case.fill(part.reference)}
            return _finite(child.score("similarity", payload, case.left_s)), ""
        if isinstance(part, PythonGrader):
            given = {"source": part.source, "sample": case.sample, "item": case.item}
            return _finite(child.score("grade", given, case.left_s)), ""
        assert model is not None
        return _asked(part, model, case)
    except MissingInAnswerError as error:
        if error.of_tools and "output_tools" not in case.sample:
            raise InvalidRecordError(
                'the grader sees the tool calls, but the agent returned none: return {"answer": …, "messages": […]}'
            ) from error
        raise


def _checked(check: StringCheck, case: _Case) -> _Score:
    text, reference = case.fill(check.text), case.fill(check.reference)
    if check.operation in ("eq", "ne"):
        passes = (text == reference) == (check.operation == "eq")
    elif not reference:
        if not check.reference.sees_the_answer:
            raise InvalidRecordError("the reference is empty, and every text contains it")
        return 0.0, "what is looked for is empty"
    elif check.operation == "like":
        passes = reference in text
    else:
        passes = reference.casefold() in text.casefold()
    return (1.0, "") if passes else (0.0, f"not {check.operation}: {text!r:.120} and {reference!r:.120}")


def _asked(part: ScoreModel, model: ChatModel, case: _Case) -> _Score:
    messages = [{"role": role, "content": case.fill(content)} for role, content in part.messages]
    return model.answer(messages, _SCHEMA, 0, partial(_parsed, part))


def _parsed(part: ScoreModel, text: str) -> _Score:
    """The score within the range, with the conclusions. Raises InvalidRecordError."""
    answer = parse_object(text)
    result = answer.get("result")
    if isinstance(result, bool) or not isinstance(result, (int, float)):
        raise InvalidRecordError(f"the judge model's answer has no number as result: {json_text(answer):.200}")
    steps = answer.get("steps")
    conclusions = [
        str(step["conclusion"]) for step in (steps if isinstance(steps, list) else []) if "conclusion" in _object(step)
    ]
    return min(max(_finite(result), part.low), part.high), " | ".join(conclusions)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _finite(score: float) -> float:
    if not math.isfinite(score):
        raise InvalidRecordError(f"the score is {score}")
    return float(score)
