"""Fills in `{name}` in arguments, variables and files of an agent."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from trainspan_rollouts.task_file import Task

__all__ = ["fill_in", "names_in", "task_values"]

_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")


def task_values(task: Task, task_file: Path) -> dict[str, object]:
    """`task_file`, the fields of an object input, `id` and `input`."""
    own = task.input if isinstance(task.input, dict) else {}
    return {"task_file": str(task_file), **own, "id": task.id, "input": task.input}


def fill_in(text: str, values: Mapping[str, object]) -> str:
    """Replaces the names of `values`, whatever is no text as JSON; keeps other braces."""

    def replace(match: re.Match[str]) -> str:
        if match[1] not in values:
            return match[0]
        value = values[match[1]]
        return value if isinstance(value, str) else json.dumps(value)

    return _PLACEHOLDER.sub(replace, text)


def names_in(text: str) -> Iterator[str]:
    """The names in braces."""
    return (match[1] for match in _PLACEHOLDER.finditer(text))
