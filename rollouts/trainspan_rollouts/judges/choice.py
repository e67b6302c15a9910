"""Finds the judge that a setting names: a judge by name, a rubric, or a function."""

import os
from pathlib import Path

from trainspan_rollouts.judges.chat_model import ChatModel
from trainspan_rollouts.judges.judge import JudgeFunction
from trainspan_rollouts.judges.named import NAMED, named_judge
from trainspan_rollouts.judges.rubric import read_rubric
from trainspan_rollouts.judges.rubric_judge import rubric_judge
from trainspan_schemas.agents.functions import code_digest, load_function
from trainspan_schemas.errors import UsageError

__all__ = ["find_judge"]


def find_judge(name: str, timeout_s: float) -> JudgeFunction:
    """Finds the judge; what it starts ends within `timeout_s`.

    Raises UsageError if there is none of that name, or it takes other arguments, and ProcessError if its module raises.
    """
    if name.partition(":")[0] in NAMED:
        return named_judge(name, timeout_s)
    if name.endswith(".toml"):
        rubric = read_rubric(Path(name))
        return rubric_judge(rubric, ChatModel(rubric, timeout_s))
    os.environ.setdefault("OPENAI_API_KEY", "trainspan")  # the judge's module may create a client
    try:
        function = load_function(name, "task", "result", may_be_async=True)
    except UsageError as error:
        known = ", ".join(f"{kind}:FIELD" for kind in NAMED)
        raise UsageError(f"--judge: {error}; judges by name are {known}; a rubric is a file NAME.toml") from error
    return JudgeFunction(name, function, code_digest(name))
