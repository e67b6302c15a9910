"""Shopping problems of four kinds. A hash assigns each combination of numbers to training or to the hold-out."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

NAMES = ("Mia", "Ben", "Eva", "Tom", "Lea", "Max", "Ida", "Jon", "Ada", "Leo")
GOODS = ("pens", "cups", "plates", "apples", "caps", "books", "lamps", "balls", "bags", "toys")
KINDS = {
    "pay": (
        "{name} buys {a} {first} for {b} coins each and {second} for {c} coins. How many coins does {name} pay?",
        "{a}*{b}+{c}",
    ),
    "left": (
        "{name} has {c} coins and buys {a} {first} for {b} coins each. How many coins are left?",
        "{c}-{a}*{b}",
    ),
    "both": (
        "{name} buys {a} {first} for {b} coins each and {d} {second} for {c} coins each. How many coins does {name} pay?",
        "{a}*{b}+{d}*{c}",
    ),
    "sell": (
        "{name} packs {a} boxes with {b} {first} each and sells {c} of the {first}. How many {first} are left?",
        "{a}*{b}-{c}",
    ),
}

Part = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One question; `numbers` decide whether it is held out."""

    text: str
    answer: str
    calculation: str
    numbers: tuple[int, ...]

    @property
    def is_heldout(self) -> bool:
        """Every fifth combination of numbers."""
        return hashlib.sha256(repr(self.numbers).encode()).digest()[0] % 5 == 0


def problem(generator: random.Random) -> Problem:
    """Draws a problem of any kind; no result is negative."""
    kind = generator.choice(list(KINDS))
    text, calculation = KINDS[kind]
    a, b, d = (generator.randint(2, 9) for _ in range(3))
    c = generator.randint(2, 9) if kind == "both" else generator.randint(2, 20)
    if kind == "left":
        c += a * b
    if kind == "sell":
        c = generator.randint(1, a * b - 1)
    first, second = generator.sample(GOODS, 2)
    values = {"name": generator.choice(NAMES), "first": first, "a": a, "b": b, "c": c, "d": d}
    values["second"] = second if kind == "both" else f"one {second[:-1]}"
    answers = {"pay": a * b + c, "left": c - a * b, "both": a * b + d * c, "sell": a * b - c}
    numbers = (a, b, c, d) if kind == "both" else (a, b, c)
    return Problem(text.format(**values), str(answers[kind]), calculation.format(**values), numbers)


def problems(part: Part, seed: int) -> Iterator[Problem]:
    """Yields problems of one part endlessly; none occurs twice."""
    generator, seen = random.Random(f"{part}-{seed}"), set()
    while True:
        drawn = problem(generator)
        if drawn.is_heldout == (part == "heldout") and drawn.text not in seen:
            seen.add(drawn.text)
            yield drawn
