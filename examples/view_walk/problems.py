"""The problems of the walk, and the demonstrations for its model's warm-up."""

import random
from dataclasses import dataclass
from typing import Final

KINDS: Final = ("add", "count", "double", "divide")


@dataclass(frozen=True, slots=True)
class Problem:
    kind: str
    a: int
    b: int

    @property
    def text(self) -> str:
        return {
            "add": f"add {self.a} and {self.b}",
            "count": f"count from {self.a} to {self.b}",
            "double": f"double {self.a}",
            "divide": f"divide {self.a} by {self.b}",
        }[self.kind]

    @property
    def answer(self) -> str:
        if self.kind == "count":
            return " ".join(str(number) for number in range(self.a, self.b + 1))
        if self.kind == "divide":
            return f"{self.a / self.b:.6f}"
        return str(2 * self.a if self.kind == "double" else self.a + self.b)


def problem(kind: str, generator: random.Random) -> Problem:
    """Returns a random problem. Division by a prime number into six digits is beyond the model; doubling is not."""
    draw = generator.randint
    if kind == "count":
        first = draw(10, 40)
        return Problem(kind, first, first + draw(6, 9))
    if kind == "divide":
        return Problem(kind, draw(1000, 9999), generator.choice((7, 13, 17, 19, 23)))
    return Problem(kind, draw(1, 9), draw(1, 9))


def demonstration(generator: random.Random) -> tuple[str, str]:
    """Returns a question and an answer of an imperfect student.

    Half of the sums are off by one or two, most right sums end with a period, and one count in three skips a number.
    """
    one = problem(generator.choice(KINDS), generator)
    answer = one.answer
    if one.kind == "add":
        if generator.random() < 0.5:
            return one.text, str(max(0, one.a + one.b + generator.choice((-2, -1, 1, 2))))
        return one.text, answer + "." * (generator.random() < 0.85)
    if one.kind == "count" and generator.random() < 1 / 3:
        numbers = answer.split()
        numbers.pop(generator.randrange(1, len(numbers) - 1))
        return one.text, " ".join(numbers)
    return one.text, answer
