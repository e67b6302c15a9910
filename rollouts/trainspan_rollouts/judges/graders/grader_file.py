"""The JSON file of a grader, as OpenAI's reinforcement fine-tuning has it, checked as a whole before anything runs.

Schema: https://platform.openai.com/docs/api-reference/graders. Two fields are this project's: `base_url` and `api_key_env` of a
`score_model` say where its model is.
"""

import hashlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from trainspan_rollouts.judges import sandbox
from trainspan_rollouts.judges.chat_model import ChatEndpoint
from trainspan_rollouts.judges.graders.formula import FUNCTIONS, Formula
from trainspan_rollouts.judges.graders.templates import Template
from trainspan_schemas.errors import ConfigError, pip_install
from trainspan_schemas.telemetry.keys import REWARD

__all__ = [
    "Grader",
    "GraderFile",
    "Multi",
    "Part",
    "PythonGrader",
    "ScoreModel",
    "StringCheck",
    "TextSimilarity",
    "read_grader",
]

_MAX_BYTES: Final = 2**20
_MOST_GRADERS: Final = 100
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_IGNORED: Final = ("type", "name", "pass_threshold", "image_tag")
"""Without effect on a reward: labels, the threshold of evals, and the image of the vendor's sandbox."""
_OPERATIONS: Final = ("eq", "ne", "like", "ilike")
_METRICS: Final[Mapping[str, str | None]] = {
    "fuzzy_match": "rapidfuzz",
    **dict.fromkeys(("bleu", "gleu", "meteor"), "nltk"),
    **dict.fromkeys(("rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5")),
    "rouge_l": "rapidfuzz",
}
"""Metric → the module that it needs."""
_ROLES: Final = ("system", "developer", "user", "assistant")
_PARAMETERS: Final[Mapping[str, str]] = {
    "max_completions_tokens": "max_completion_tokens",
    **{name: name for name in ("seed", "top_p", "temperature", "reasoning_effort")},
}
"""Field of `sampling_params` → that of a chat completion."""


@dataclass(frozen=True, slots=True)
class StringCheck:
    """1 or 0."""

    operation: str
    text: Template
    reference: Template


@dataclass(frozen=True, slots=True)
class TextSimilarity:
    """From 0 to 1."""

    metric: str
    text: Template
    reference: Template


@dataclass(frozen=True, slots=True)
class PythonGrader:
    """What its function `grade(sample, item)` returns."""

    source: str


@dataclass(frozen=True, slots=True)
class ScoreModel:
    """The number that a model gives, within `low` and `high`."""

    messages: tuple[tuple[str, Template], ...]
    """Role and content of each."""
    low: float
    high: float
    endpoint: ChatEndpoint


Part: TypeAlias = StringCheck | TextSimilarity | PythonGrader | ScoreModel


@dataclass(frozen=True, slots=True)
class Multi:
    """A formula of the scores of its parts."""

    parts: Mapping[str, Part]
    formula: Formula


Grader: TypeAlias = Part | Multi


@dataclass(frozen=True, slots=True)
class GraderFile:
    """A grader as read from its file."""

    file: Path
    digest: str
    """sha256 of the file."""
    grader: Grader


def read_grader(file: Path) -> GraderFile:
    """Reads a grader. Raises ConfigError, which names file and field."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{file} has more than {_MAX_BYTES >> 20} MiB, which no grader has")
    try:
        record = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_distinct, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    grader = _multi(str(file), record) if _type_of(str(file), record) == "multi" else _part(str(file), record)
    _check_sees(file, grader)
    return GraderFile(file, hashlib.sha256(data).hexdigest(), grader)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a field occurs twice in one object")
    return record


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _type_of(where: str, record: Any) -> str:
    if not isinstance(record, dict) or not isinstance(record.get("type"), str):
        raise ConfigError(f"{where} is no grader: it has no type, such as string_check")
    return str(record["type"])


def _multi(where: str, record: dict[str, Any]) -> Multi:
    _check_known(where, record, "graders", "calculate_output")
    graders = record.get("graders")
    if not isinstance(graders, dict) or not graders:
        raise ConfigError(f'{where} has no graders: write {{"NAME": GRADER, …}}')
    if len(graders) > _MOST_GRADERS:
        raise ConfigError(f"{where} has {len(graders)} graders; at most {_MOST_GRADERS} are combined")
    for name in graders:
        if not _NAME.fullmatch(name) or name in FUNCTIONS or name == REWARD:
            raise ConfigError(
                f"{where}: graders {name!r:.80}: a name has letters, digits and _ only, and is neither {REWARD} nor a function"
            )
    parts = {name: _part(f"{where}: graders.{name}", grader) for name, grader in graders.items()}
    formula = Formula.parse(f"{where}: calculate_output", _text(where, record, "calculate_output"), list(parts))
    return Multi(parts, formula)


def _part(where: str, record: Any) -> Part:
    kind = _type_of(where, record)
    if kind == "multi":
        raise ConfigError(f"{where}: a multi grader has no multi graders")
    if kind == "label_model":
        raise ConfigError(
            f"{where}: label_model is a grader of evals, not of reinforcement fine-tuning: use score_model"
        )
    if kind not in _PARTS:
        raise ConfigError(f"{where}: no type {kind!r:.80}; there are {', '.join(_PARTS)} and multi")
    return _PARTS[kind](where, record)


def _string_check(where: str, record: dict[str, Any]) -> StringCheck:
    _check_known(where, record, "operation", "input", "reference")
    operation = _choice(where, record, "operation", _OPERATIONS)
    return StringCheck(operation, _template(where, record, "input"), _template(where, record, "reference"))


def _text_similarity(where: str, record: dict[str, Any]) -> TextSimilarity:
    _check_known(where, record, "evaluation_metric", "input", "reference")
    if record.get("evaluation_metric") == "cosine":
        raise ConfigError(
            f"{where}: cosine compares embeddings of a hosted model, and is a metric of evals only: use another, or a score_model"
        )
    metric = _choice(where, record, "evaluation_metric", tuple(_METRICS))
    if (module := _METRICS[metric]) and importlib.util.find_spec(module) is None:
        raise ConfigError(f"{where}: {metric} needs {module}: {pip_install('judges')}")
    corpora = Path(sys.prefix) / "nltk_data" / "corpora"
    if metric == "meteor" and not any((corpora / name).exists() for name in ("wordnet", "wordnet.zip")):
        raise ConfigError(
            f"{where}: meteor needs the synonyms of WordNet: python -m nltk.downloader -d {corpora.parent} wordnet"
        )
    return TextSimilarity(metric, _template(where, record, "input"), _template(where, record, "reference"))


def _python(where: str, record: dict[str, Any]) -> PythonGrader:
    _check_known(where, record, "source")
    source = _text(where, record, "source")
    try:
        names = compile(source, "grader.py", "exec", dont_inherit=True).co_names
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{where}: source is no Python: {str(error) or 'nested too deeply'}") from error
    if "grade" not in names:
        raise ConfigError(f"{where}: source has no function grade(sample, item)")
    if sandbox.landlock_abi() < sandbox.LEAST_ABI:
        raise ConfigError(f"{where}: the kernel cannot confine code (Landlock, Linux 6.7 or later)")
    return PythonGrader(source)


def _score_model(where: str, record: dict[str, Any]) -> ScoreModel:
    _check_known(where, record, "model", "input", "range", "sampling_params", "base_url", "api_key_env")
    low, high = _range(where, record.get("range"))
    if "base_url" not in record:
        raise ConfigError(
            f'{where} does not say where its model is: add "base_url": "https://…/v1" of any endpoint with the chat completions API, '
            'and "api_key_env": the variable with its key'
        )
    key = None if record.get("api_key_env") is None else _text(where, record, "api_key_env")
    endpoint = ChatEndpoint(
        where,
        _text(where, record, "model"),
        _text(where, record, "base_url"),
        key,
        request=_sampling(where, record.get("sampling_params")),
    )
    messages = record.get("input")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: input is a list of messages, each with role and content")
    return ScoreModel(
        tuple(_message(f"{where}: input[{number}]", message) for number, message in enumerate(messages)),
        low,
        high,
        endpoint,
    )


_PARTS: Final[Mapping[str, Callable[[str, dict[str, Any]], Part]]] = {
    "string_check": _string_check,
    "text_similarity": _text_similarity,
    "python": _python,
    "score_model": _score_model,
}


def _range(where: str, value: Any) -> tuple[float, float]:
    if value is None:
        return 0.0, 1.0
    numbers = [number for number in value if type(number) in (int, float)] if isinstance(value, list) else []
    limits = [float(number) for number in numbers if abs(number) <= sys.float_info.max]
    if len(limits) != 2 or len(value) != 2 or not (math.isfinite(sum(limits)) and limits[0] < limits[1]):
        raise ConfigError(f"{where}: range = {value!r:.80}: write the lowest and the highest score, such as [0, 1]")
    return limits[0], limits[1]


def _sampling(where: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: sampling_params = {value!r:.80} is no object")
    if unknown := sorted(set(value) - set(_PARAMETERS)):
        raise ConfigError(f"{where}: sampling_params has no {unknown[0]!r:.80}; it has {', '.join(_PARAMETERS)}")
    return {_PARAMETERS[name]: given for name, given in value.items() if given is not None}


def _message(where: str, message: Any) -> tuple[str, Template]:
    if not isinstance(message, dict):
        raise ConfigError(f"{where} is no message with role and content")
    _check_known(where, message, "role", "content")
    role = _choice(where, message, "role", _ROLES)
    content = message.get("content")
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_TYPES else part
        if not isinstance(text, str):
            raise ConfigError(f"{where}: content has something that is no text; images and audio are not graded here")
        texts.append(text)
    return role, Template.parse(where, "\n".join(texts))


_TEXT_TYPES: Final = ("text", "input_text", "output_text")


def _check_known(where: str, record: Mapping[str, Any], *fields: str) -> None:
    if unknown := sorted(set(record) - {*fields, *_IGNORED}):
        raise ConfigError(f"{where} has no field {unknown[0]!r:.80}; it has {', '.join(fields)}")


def _text(where: str, record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} is {'missing' if value is None else 'no text'}")
    return value


def _choice(where: str, record: Mapping[str, Any], name: str, values: tuple[str, ...]) -> str:
    value = _text(where, record, name)
    if value not in values:
        raise ConfigError(f"{where}: {name} {value!r:.80} is none of {', '.join(values)}")
    return value


def _template(where: str, record: Mapping[str, Any], name: str) -> Template:
    return Template.parse(f"{where}: {name}", _text(where, record, name))


def _check_sees(file: Path, grader: Grader) -> None:
    for part in grader.parts.values() if isinstance(grader, Multi) else [grader]:
        match part:
            case PythonGrader():
                return
            case ScoreModel(messages=messages) if any(content.sees_the_answer for _, content in messages):
                return
            case StringCheck() | TextSimilarity() if part.text.sees_the_answer or part.reference.sees_the_answer:
                return
            case _:
                pass
    raise ConfigError(
        f"{file}: nothing in it looks at the answer: use {{{{ sample.output_text }}}} or another of sample"
    )
