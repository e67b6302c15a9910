"""The file of a judge model: criteria with weights, what the model sees, and where it is."""

import hashlib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from trainspan_rollouts.judges.chat_model import ChatEndpoint
from trainspan_schemas.config.load import build_table
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.telemetry.keys import REWARD

__all__ = ["Criterion", "Rubric", "read_rubric"]

PARTS: Final = ("task", "reference", "answer", "conversation", "tools")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_OWN_FIELDS: Final = ("model", "messages", "response_format", "stream", "n")


@dataclass(frozen=True, slots=True)
class Criterion:
    """A question that the model answers with a score and a reason."""

    name: str
    """The evaluation's name."""
    question: str
    weight: float = 1.0
    of: Literal["rollout", "call"] = "rollout"
    """What it is asked about: the whole, or each answer of an agent (stored_rubric.py)."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The keys with a plain value."""

    model: str = ""
    base_url: str = ""
    """Of an endpoint with the chat completions API, ending in `/v1` for most."""
    api_key_env: str | None = None
    """The environment variable with the key; None: no key is sent."""
    sees: tuple[str, ...] = ("task", "answer")
    """What the model is shown: `task`, `reference` (the task's answer), `answer` (of the agent), `conversation`, `tools` (its
    tool results alone)."""
    instructions: str = ""
    """What else the model is told."""
    votes: int = 1
    """Requests for each verdict; scores are their means."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the endpoint is asked for JSON."""
    compare: bool = False
    """Judge the rollouts of a group against each other, in one request for each vote."""
    reverse_share: float = 0.1
    """With `compare`, the share of groups that are shown in reverse order, too: it measures the position bias."""
    seed: int = 0
    """Of the order of answers with `compare`."""


@dataclass(frozen=True, slots=True)
class Rubric:
    """A rubric as read from its file."""

    file: Path
    digest: str
    """sha256 of the file."""
    options: _Options
    endpoint: ChatEndpoint
    criteria: tuple[Criterion, ...]
    low: float = 0.0
    high: float = 10.0
    """The model's scale; scores of the judge are 0 at `low` and 1 at `high`."""

    def reward(self, scores: Mapping[str, float]) -> float:
        """The weighted mean of the criteria's scores."""
        weights = sum(criterion.weight for criterion in self.criteria)
        return sum(criterion.weight * scores[criterion.name] for criterion in self.criteria) / weights


def read_rubric(file: Path) -> Rubric:
    """Reads a rubric. Raises ConfigError, which names file and key."""
    try:
        data = file.read_bytes()
        values = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from error
    low, high = _scale(file, values.pop("scale", [0, 10]))
    request = values.pop("request", {})
    criteria = _criteria(file, values.pop("criteria", []))
    options: _Options = build_table(str(file), _Options, values)
    _check(file, options, request)
    endpoint = ChatEndpoint(
        str(file), options.model, options.base_url, options.api_key_env, options.response_format, request
    )
    return Rubric(file, hashlib.sha256(data).hexdigest(), options, endpoint, criteria, low, high)


def _scale(file: Path, scale: Any) -> tuple[float, float]:
    numbers = [value for value in scale if type(value) in (int, float)] if isinstance(scale, list) else []
    if len(numbers) != 2 or len(scale) != 2 or not (math.isfinite(sum(numbers)) and numbers[0] < numbers[1]):
        raise ConfigError(f"{file}: scale = {scale!r}: write the lowest and the highest score, such as [0, 10]")
    return numbers[0], numbers[1]


def _criteria(file: Path, tables: Any) -> tuple[Criterion, ...]:
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file} has no criteria: write [[criteria]] with a name and a question for each")
    criteria: dict[str, Criterion] = {}
    for number, table in enumerate(tables, 1):
        where = f"{file}: criterion {number}"
        for key in ("name", "question"):
            if not isinstance(table.get(key), str) or not table[key].strip():
                raise ConfigError(f"{where} has no {key}")
        criterion: Criterion = build_table(where, Criterion, table)
        if not _NAME.fullmatch(criterion.name) or criterion.name == REWARD or criterion.name in criteria:
            raise ConfigError(
                f"{where}: the name {criterion.name!r} is taken, or has other marks than letters, digits and _"
            )
        if not (math.isfinite(criterion.weight) and criterion.weight > 0):
            raise ConfigError(
                f"{where}: weight = {criterion.weight:g} must be positive: ask so that a higher score is better"
            )
        criteria[criterion.name] = criterion
    return tuple(criteria.values())


def _check(file: Path, options: _Options, request: Any) -> None:
    if unknown := [part for part in options.sees if part not in PARTS]:
        raise ConfigError(f"{file}: sees has {unknown[0]!r}; it may have {', '.join(PARTS)}")
    if not {"answer", "conversation", "tools"} & set(options.sees):
        raise ConfigError(f"{file}: sees has nothing that the agent did: add answer, conversation or tools")
    if not 1 <= options.votes <= 100:
        raise ConfigError(f"{file}: votes = {options.votes} must be from 1 to 100")
    if not 0 <= options.reverse_share <= 1:
        raise ConfigError(f"{file}: reverse_share = {options.reverse_share:g} must be from 0 to 1")
    if not isinstance(request, dict) or set(request) & set(_OWN_FIELDS):
        raise ConfigError(f"{file}: [request] has fields of the request's body, but none of {', '.join(_OWN_FIELDS)}")
    if options.votes > 1 and not options.compare and request.get("temperature") == 0:
        raise ConfigError(
            f"{file}: {options.votes} votes at temperature 0 are the same vote: raise it, or set votes = 1"
        )
