"""Templates of graders: text with `{{ item.NAME }}` and `{{ sample.NAME }}`, each a path into JSON values.

Templating of https://platform.openai.com/docs/guides/graders: a path has names after dots and indexes in brackets. What is
filled in is never read as a template again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainspan_rollouts.judges.answers import json_text
from trainspan_schemas.errors import ConfigError, InvalidRecordError

__all__ = ["MissingInAnswerError", "Template"]

_SLOT: Final = re.compile(r"\{\{([^{}]*)\}\}")
_STEP: Final = re.compile(r"""\.([^\s.\[\]{}"']+)|\[(\d{1,9})\]|\["([^"]+)"\]|\['([^']+)'\]""")
_MAX_CHARS: Final = 2**24
_NAMESPACE: Final = re.compile(r"item|sample")
SAMPLE: Final = ("output_text", "output_json", "output_tools", "choices")
"""The variables of the namespace `sample`."""


class MissingInAnswerError(Exception):
    """The answer lacks what a template takes from it: a fault of the answer, not of task or grader."""

    def __init__(self, path: str, *, of_tools: bool) -> None:
        super().__init__(f"the answer has no {path}")
        self.of_tools = of_tools
        """Whether it is about calls of tools."""


@dataclass(frozen=True, slots=True)
class _Slot:
    path: str
    namespace: str
    steps: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A text whose slots are known to be paths."""

    parts: tuple[str | _Slot, ...]

    @classmethod
    def parse(cls, where: str, text: str) -> "Template":
        """Raises ConfigError for a slot that is no path into `item` or `sample`."""
        parts: list[str | _Slot] = []
        end = 0
        for match in _SLOT.finditer(text):
            parts += [text[end : match.start()], _slot(where, match[1].strip())]
            end = match.end()
        return cls((*parts, text[end:]))

    @property
    def sees_the_answer(self) -> bool:
        return any(isinstance(part, _Slot) and part.namespace == "sample" for part in self.parts)

    def fill(self, item: Mapping[str, Any], sample: Mapping[str, Any]) -> str:
        """The text: strings as they are, other values as JSON.

        Raises InvalidRecordError if the item lacks a value, and MissingInAnswerError if the sample does.
        """
        spaces, texts, length = {"item": item, "sample": sample}, [], 0
        for part in self.parts:
            texts.append(part if isinstance(part, str) else _text(part, spaces[part.namespace]))
            length += len(texts[-1])
            if length > _MAX_CHARS:
                raise InvalidRecordError(f"a filled template has more than {_MAX_CHARS:,} characters")
        return "".join(texts)


def _slot(where: str, path: str) -> _Slot:
    match = _NAMESPACE.match(path)
    steps = list(_STEP.finditer(path, match.end() if match else 0))
    if match is None or not steps or match[0] + "".join(step[0] for step in steps) != path:
        raise ConfigError(
            f"{where}: {path!r:.80} in {{{{ }}}} is no value: write {{{{ item.FIELD }}}} or {{{{ sample.output_text }}}}"
        )
    names = tuple(int(step[2]) if step[2] else str(step[1] or step[3] or step[4]) for step in steps)
    if match[0] == "sample" and names[0] not in SAMPLE:
        raise ConfigError(f"{where}: {path!r:.80}: sample has {', '.join(SAMPLE)} here")
    return _Slot(path, match[0], names)


def _text(slot: _Slot, values: Mapping[str, Any]) -> str:
    value: Any = values
    for step in slot.steps:
        if isinstance(step, int):
            value = value[step] if isinstance(value, list) and step < len(value) else None
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    if value is not None:
        return value if isinstance(value, str) else json_text(value)
    if slot.namespace == "sample":
        of_tools = slot.steps[0] == "output_tools" or (slot.steps[0] == "choices" and "tool_calls" in slot.steps)
        raise MissingInAnswerError(slot.path.removeprefix("sample."), of_tools=of_tools)
    raise InvalidRecordError(f"the task has no {slot.path}")
