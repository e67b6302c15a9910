"""Shopping problems of four kinds, as the files that a user of a vendor's fine-tuning holds.

python problems.py DIR     writes DIR/tasks.jsonl, rows for reinforcement fine-tuning, and DIR/chat.jsonl, good conversations
"""

import hashlib
import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SYSTEM = "Solve the problem. Write `calc: EXPRESSION` to get a result, then `answer: NUMBER`."
KINDS = {
    "{name} buys {a} {things} for {b} dollars each and a bag for {c} dollars. How many dollars does {name} pay?": "{a}*{b}+{c}",
    "{name} has {a} boxes with {b} {things} each and gives {c} {things} away. How many {things} are left?": "{a}*{b}-{c}",
    "{name} has {a} {things}, finds {b} more and loses {c}. How many {things} does {name} have?": "{a}+{b}-{c}",
    "{name} pays {a} dollars for shoes and {b} dollars for each of {c} {things}. How many dollars is that?": "{a}+{b}*{c}",
}
NAMES = ("Tom", "Ann", "Max", "Eva")
THINGS = ("pens", "cups", "eggs", "nuts")


def problem(generator: random.Random) -> dict[str, Any]:
    """A row: messages, the answer for the grader, split. A hash of the text puts every fifth problem into the held-out split."""
    kind, expression = generator.choice(list(KINDS.items()))
    numbers = {letter: generator.randint(2, 9) for letter in "abc"}
    text = kind.format(name=generator.choice(NAMES), things=generator.choice(THINGS), **numbers)
    return {
        "messages": messages_of(text),
        "reference_answer": str(eval(expression.format(**numbers))),  # our own expression
        "split": "val" if hashlib.sha256(text.encode()).digest()[0] % 5 == 0 else "train",
    }


def messages_of(text: str) -> list[dict[str, str]]:
    """The messages that ask for a problem's answer."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """The row's problem with right answers of the assistant, as a line for supervised fine-tuning."""
    expression = expression_of(row["messages"][-1]["content"])
    answered = [
        {"role": "assistant", "content": f"calc: {expression}"},
        {"role": "user", "content": f"result: {row['reference_answer']}"},
        {"role": "assistant", "content": f"answer: {row['reference_answer']}"},
    ]
    return {"messages": [*row["messages"], *answered]}


def problems(seed: int) -> Iterator[dict[str, Any]]:
    """Different problems, in random order."""
    generator, seen = random.Random(seed), set()
    while True:
        row = problem(generator)
        if (text := row["messages"][-1]["content"]) not in seen:
            seen.add(text)
            yield row


def expression_of(text: str) -> str | None:
    """The calculation that a problem asks for; None if the text is no problem of ours."""
    numbers = re.findall(r"\d+", text)
    for kind, expression in KINDS.items():
        if _outline(text) == _outline(kind) and len(numbers) == 3:
            return expression.format(**dict(zip(re.findall(r"{([abc])}", kind), numbers, strict=True)))
    return None


def _outline(text: str) -> str:
    """The text without its names, things and numbers."""
    return re.sub("|".join(("{\\w+}", r"\d+", *NAMES, *THINGS)), "_", text)


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rows = list(itertools.islice(problems(0), 2000))
    write(folder / "tasks.jsonl", rows)
    write(folder / "chat.jsonl", [conversation(row) for row in rows if row["split"] == "train"][:600])
