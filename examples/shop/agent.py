"""A shopping agent on the plain openai SDK: two worked examples, then the question; the model may ask for a calculation.

opentelemetry-instrument python agent.py "Mia buys 4 pens for 3 coins each. How many coins does she pay?"
"""

import asyncio
import functools
import re
import sys
from fractions import Fraction
from typing import Any

from openai import AsyncOpenAI

MAX_CALLS = 3
NUMBER = r"\d{1,6}"
SYSTEM = "You solve shopping problems. First write one calculation, then the answer."
EXAMPLES = (
    ("Sam buys 2 books for 7 coins each and a map for 5 coins. How many coins does he pay?", "2*7+5", "19"),
    ("Zoe has 30 coins. She buys 3 cups for 4 coins each. How many coins are left?", "30-3*4", "18"),
)


@functools.cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI(max_retries=4)


def calculate(text: str) -> str:
    """The calculator: sums, differences and products of whole numbers, e.g. `30-3*4`."""
    if not re.fullmatch(rf"{NUMBER}( ?[-+*] ?{NUMBER}){{1,4}}", text):
        return "error"
    products = re.sub(rf"{NUMBER}(?: ?\* ?{NUMBER})+", _product, text)
    return str(sum(Fraction(term) for term in re.findall(rf"[-+]?{NUMBER}", products.replace(" ", ""))))


def _product(match: re.Match[str]) -> str:
    value = 1
    for factor in match[0].split("*"):
        value *= int(factor)
    return str(value)


def conversation(question: str) -> list[Any]:
    """Returns the first request's messages."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for asked, calculation, answer in EXAMPLES:
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": f"calc: {calculation}"},
            {"role": "user", "content": f"result: {answer}"},
            {"role": "assistant", "content": f"answer: {answer}"},
        ]
    return [*messages, {"role": "user", "content": question}]


async def solve(task: dict[str, Any]) -> str:
    """Returns the model's answer to `task["input"]`, or "" if it gives none."""
    messages = conversation(task["input"])
    for _ in range(MAX_CALLS):
        response = await client().chat.completions.create(model="policy", messages=messages, max_tokens=24)
        reply = (response.choices[0].message.content or "").strip()
        word, _, rest = reply.partition(":")
        if word == "answer":
            return rest.strip()
        if word != "calc":
            return ""
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": f"result: {calculate(rest.strip())}"},
        ]
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve({"input": sys.argv[1]})))
