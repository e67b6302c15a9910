"""Problems for the calculator agent, and the demonstrations for its model's warm-up.

A problem is `a∘b∘c` with a in 1..99 and b and c in 2..9; every intermediate result is a whole number.
A hash assigns each combination of operands to training or to the hold-out: no combination is in both.
The hard probe uses operator pairs that never occur in training.
"""

import functools
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from agent import calculate

TRAIN_PAIRS = ("+*", "-*", "*+", "*-", "+/", "/+", "-+", "--")
PROBE_PAIRS = ("-/", "/-")

Part = Literal["train", "heldout", "probe"]


@dataclass(frozen=True, slots=True)
class Problem:
    a: int
    b: int
    c: int
    pair: str

    @property
    def text(self) -> str:
        return f"{self.a}{self.pair[0]}{self.b}{self.pair[1]}{self.c}"

    @property
    def is_heldout(self) -> bool:
        """Every fifth combination of operands."""
        return hashlib.sha256(f"{self.a},{self.b},{self.c}".encode()).digest()[0] % 5 == 0

    def steps(self, *, right_order: bool = True) -> list[tuple[str, str]]:
        """Returns the two operations with results, multiplication and division first (or the other way around)."""
        first, second = self.pair
        right_first = (second in "*/" and first in "+-") == right_order
        if right_first:
            inner = f"{self.b}{second}{self.c}"
            outer = f"{self.a}{first}{calculate(inner)}"
        else:
            inner = f"{self.a}{first}{self.b}"
            outer = f"{calculate(inner)}{second}{self.c}"
        return [(inner, calculate(inner)), (outer, calculate(outer))]

    @property
    def is_whole(self) -> bool:
        """True if both results, in the right order, are whole numbers."""
        return all(result.lstrip("-").isdigit() for _, result in self.steps())

    @property
    def answer(self) -> str:
        return self.steps()[-1][1]


@functools.cache
def space(part: Part) -> tuple[Problem, ...]:
    """Returns all problems of one part of the task space."""
    pairs = PROBE_PAIRS if part == "probe" else TRAIN_PAIRS
    every = (
        Problem(a, b, c, pair) for a in range(1, 100) for b in range(2, 10) for c in range(2, 10) for pair in pairs
    )
    return tuple(problem for problem in every if problem.is_heldout == (part != "train") and problem.is_whole)


def problems(part: Part, seed: int) -> Iterator[Problem]:
    """Yields problems of one part endlessly, in random order; each occurs once before any repeats."""
    generator = random.Random(f"{part}-{seed}")
    while True:
        yield from generator.sample(space(part), len(space(part)))


def demonstration(problem: Problem, generator: random.Random) -> list[dict[str, str]]:
    """Returns a conversation of an imperfect calculator user.

    25 % are right, 37.5 % use the wrong order, 37.5 % stop after the first step; 3 % of the operations contain a slip.
    """
    kind = generator.choices(("right", "wrong order", "stops early"), (0.25, 0.375, 0.375))[0]
    steps = problem.steps(right_order=kind != "wrong order")
    if kind == "stops early":
        steps = steps[:1]
    operations = []
    for operation, _ in steps:
        slip = generator.random() < 0.03
        operations.append(
            operation.replace(generator.choice(operation), str(generator.randint(1, 9)), 1) if slip else operation
        )
    return conversation(problem, operations)


def conversation(problem: Problem, operations: Sequence[str]) -> list[dict[str, str]]:
    """Returns the messages of a user who asks for these operations and answers with the last result."""
    messages = [{"role": "user", "content": problem.text}]
    for said in operations:
        messages.append({"role": "assistant", "content": f"calc {said}"})
        messages.append({"role": "tool", "content": calculate(said)})
    messages.append({"role": "assistant", "content": f"answer {messages[-1]['content']}"})
    return messages
