"""Finds the judge that a setting names: a judge by name, a rubric, a grader, or a function."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trainspan_rollouts.judges.chat_model import ChatModel
from trainspan_rollouts.judges.graders.grading import grader_judge
from trainspan_rollouts.judges.judge import JudgeFunction
from trainspan_rollouts.judges.named import NAMED, named_judge
from trainspan_rollouts.judges.rubrics.comparing import comparing_judge
from trainspan_rollouts.judges.rubrics.rubric import read_rubric
from trainspan_rollouts.judges.rubrics.rubric_judge import rubric_judge
from trainspan_schemas.agents.functions import code_digest, load_function
from trainspan_schemas.errors import UsageError

__all__ = ["compares_rollouts", "find_judge"]

GROUP_PARAMETER: Final = "results"
"""A function whose second parameter has this name judges a whole group."""


def find_judge(name: str, timeout_s: float) -> JudgeFunction:
    """Finds the judge; what it starts ends within `timeout_s`.

    Raises UsageError if there is none of that name, or it takes other arguments, and ProcessError if its module raises.
    """
    if name.partition(":")[0] in NAMED:
        return named_judge(name, timeout_s)
    if name.endswith(".toml"):
        rubric = read_rubric(Path(name))
        if of_calls := [criterion.name for criterion in rubric.criteria if criterion.of == "call"]:
            raise UsageError(
                f"{name}: criterion {of_calls[0]} is about calls, which are stored later: use trainspan dataset --reward {name}"
            )
        judge = comparing_judge if rubric.options.compare else rubric_judge
        return judge(rubric, ChatModel(rubric.endpoint, timeout_s))
    if name.endswith(".json"):
        return grader_judge(Path(name), timeout_s)
    os.environ.setdefault("OPENAI_API_KEY", "trainspan")  # the judge's module may create a client
    try:
        function = load_function(name, may_be_async=True)
    except UsageError as error:
        known = ", ".join(f"{kind}:FIELD" for kind in NAMED)
        raise UsageError(
            f"--judge: {error}; judges by name are {known}; a rubric is a file NAME.toml, a grader NAME.json"
        ) from error
    compares = _is_for_groups(function)
    load_function(name, "task", GROUP_PARAMETER if compares else "result", may_be_async=True)
    return JudgeFunction(name, function, code_digest(name), compares)


def compares_rollouts(name: str) -> bool:
    """Whether the judge of that name compares the rollouts of a group. Raises as `find_judge`."""
    if name.partition(":")[0] in NAMED or name.endswith(".json"):
        return False
    return read_rubric(Path(name)).options.compare if name.endswith(".toml") else _is_for_groups(load_function(name))


def _is_for_groups(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C
        return False
    return parameters[1:2] == [GROUP_PARAMETER]
