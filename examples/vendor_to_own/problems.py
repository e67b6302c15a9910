"""Shopping problems of four kinds, as tasks for `trainspan rollout` and `trainspan loop`.

python problems.py tasks.jsonl
"""

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {
    "{name} buys {a} {things} for {b} dollars each and a bag for {c} dollars. How many dollars does {name} pay?": "{a}*{b}+{c}",
    "{name} has {a} boxes with {b} {things} each and gives {c} {things} away. How many {things} are left?": "{a}*{b}-{c}",
    "{name} has {a} {things}, finds {b} more and loses {c}. How many {things} does {name} have?": "{a}+{b}-{c}",
    "{name} pays {a} dollars for shoes and {b} dollars for each of {c} {things}. How many dollars is that?": "{a}+{b}*{c}",
}
NAMES = ("Tom", "Ann", "Max", "Eva")
THINGS = ("pens", "cups", "eggs", "nuts")


def problem(generator: random.Random) -> dict[str, Any]:
    """A task: id, input, answer, split. A hash of the text puts every fifth problem into the held-out split."""
    kind, expression = generator.choice(list(KINDS.items()))
    numbers = {letter: generator.randint(2, 9) for letter in "abc"}
    text = kind.format(name=generator.choice(NAMES), things=generator.choice(THINGS), **numbers)
    digest = hashlib.sha256(text.encode())
    answer = str(eval(expression.format(**numbers)))  # our own expression
    return {
        "id": digest.hexdigest()[:12],
        "input": text,
        "answer": answer,
        "split": "val" if digest.digest()[0] % 5 == 0 else "train",
    }


def problems(seed: int) -> Iterator[dict[str, Any]]:
    """Different problems, in random order."""
    generator, seen = random.Random(seed), set()
    while True:
        found = problem(generator)
        if found["id"] not in seen:
            seen.add(found["id"])
            yield found


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


if __name__ == "__main__":
    source = problems(0)
    tasks = [next(source) for _ in range(2000)]
    Path(sys.argv[1]).write_text("".join(json.dumps(task) + "\n" for task in tasks))
