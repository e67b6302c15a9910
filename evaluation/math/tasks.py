"""Writes the tasks of the math agent from families of reasoning-gym: `python tasks.py FOLDER`.

A question's template is its text with `#` in place of every number, e.g. `Solve for k: #*k + # = #`.
A hash of the template decides whether a question is for training or held out, so no template is in both.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from calculator import calculate  # noqa: E402
from prompt import EXAMPLES, SYSTEM  # noqa: E402

from evaluation.task_files import is_heldout, write_tasks  # noqa: E402

SEED = 0
TRAIN_TASKS, HELDOUT_TASKS, DEMONSTRATIONS = 1200, 400, 400
FAMILIES: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    "leg_counting": {"min_animals": 2, "max_animals": 3, "min_instances": 1, "max_instances": 9},
    "simple_equations": {
        "min_terms": 2,
        "max_terms": 2,
        "min_value": 1,
        "max_value": 20,
        "operators": ("+", "-", "*"),
        "operators_weights": [0.5, 0.5, 0.0],
    },
}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes an expression, e.g. 3*4+2.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"description": "expression", "title": "Expression", "type": "string"},
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
        "strict": False,
    },
}
"""The tool as AutoGen describes it to the model."""


def template(question: str) -> str:
    """Returns the question with `#` in place of every number."""
    return re.sub(r"\d+", "#", question)


def shortened(question: str) -> str:
    """Returns the last line of a question: some families begin with general instructions."""
    return question.strip().splitlines()[-1].removeprefix("Now, ").strip()


def expression_of(family: str, metadata: dict[str, Any]) -> str | None:
    """Returns the expression that a careful solver would calculate; None if this module does not know one."""
    if family == "chain_sum":
        return str(metadata["expression"]).replace(" ", "")
    if family == "leg_counting":
        from reasoning_gym.arithmetic.leg_counting import ANIMALS

        return "+".join(f"{count}*{ANIMALS[animal]}" for animal, count in metadata["animals"].items())
    return equation_solution(str(metadata["equation"]), str(metadata["variable"]))


def equation_solution(equation: str, variable: str) -> str | None:
    """Returns the expression for the variable of `a*x + b = c`, in any order of its terms; None for other equations."""
    name = re.escape(variable)
    match = re.fullmatch(rf"(?:(\d+)\*)?{name} ([+-]) (\d+) = (-?\d+)", equation)
    if match:
        factor, sign, constant, total = match.groups()
        inner = f"{total}{'-' if sign == '+' else '+'}{constant}"
        return f"({inner})/{factor}" if factor else inner
    match = re.fullmatch(rf"(\d+) ([+-]) (?:(\d+)\*)?{name} = (-?\d+)", equation)
    if match:
        constant, sign, factor, total = match.groups()
        inner = f"{total}-{constant}" if sign == "+" else f"{constant}-{total}".replace("--", "+")
        return f"({inner})/{factor}" if factor else inner
    return None


def questions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (family, item) endlessly, one family after the other; an item has question, answer and metadata."""
    import reasoning_gym

    size = 20 * (TRAIN_TASKS + HELDOUT_TASKS)
    data = {name: reasoning_gym.create_dataset(name, seed=SEED, size=size, **how) for name, how in FAMILIES.items()}
    for index in range(size):
        for name, dataset in data.items():
            yield name, dataset[index]


def tasks() -> list[dict[str, Any]]:
    """Returns training and held-out tasks; no question occurs twice."""
    wanted = {"train": TRAIN_TASKS, "val": HELDOUT_TASKS}
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    for family, item in questions():
        question = shortened(item["question"])
        split = "val" if is_heldout(template(question)) else "train"
        if question in seen or not wanted[split]:
            continue
        seen.add(question)
        wanted[split] -= 1
        meta = {
            "family": family,
            "template": template(question),
            "expression": expression_of(family, item["metadata"]),
        }
        found.append(
            {
                "id": f"{split}-{len(found):04d}",
                "input": question,
                "answer": item["answer"],
                "split": split,
                "meta": meta,
            }
        )
        if not any(wanted.values()):
            break
    return found


def conversation(question: str, expression: str, answer: str, number: int) -> list[dict[str, Any]]:
    """Returns the messages of one solved question."""
    call = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
    name = f"call-{number}"
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": name, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": name, "content": answer},
        {"role": "assistant", "content": answer},
    ]


def demonstrations(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what a perfect solver would do with training tasks: the agent's prompt, then the completion to learn."""
    prompt: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for number, example in enumerate(EXAMPLES):
        prompt += conversation(*example, number)
    found = []
    for task in [task for task in drawn if task["split"] == "train" and task["meta"]["expression"]][:DEMONSTRATIONS]:
        expression, answer = task["meta"]["expression"], task["answer"]
        if calculate(expression) != answer:
            raise ValueError(f"{task['input']!r}: {expression} is {calculate(expression)}, not {answer}")
        question, *solution = conversation(task["input"], expression, answer, len(EXAMPLES))
        found.append({"prompt": [*prompt, question], "completion": solution, "tools": [TOOL]})
    return found


if __name__ == "__main__":
    drawn = tasks()
    write_tasks(Path(sys.argv[1]), drawn, demonstrations(drawn))
