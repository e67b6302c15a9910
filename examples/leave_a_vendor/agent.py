"""An ordinary agent on the openai package: the model writes a calculation, gets its result, and answers.

python agent.py "Tom buys 3 pens for 4 dollars each and a bag for 2 dollars. How many dollars does he pay?"
"""

import ast
import functools
import operator
import sys
from typing import Any

from openai import OpenAI

MAX_CALLS = 4
OPERATORS: dict[type[ast.operator], Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@functools.cache
def client() -> OpenAI:
    return OpenAI(max_retries=4)


def calculate(expression: str) -> str:
    """The value of an expression of whole numbers, +, - and *; "error" for anything else."""
    try:
        return str(_value(ast.parse(expression[:40].strip(), mode="eval").body))
    except (SyntaxError, ValueError, MemoryError):
        return "error"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**6:
        return node.value
    raise ValueError("only whole numbers, +, - and *")


def solve(task: dict[str, Any]) -> str:
    """The model's answer to the messages of `task["input"]`, or "" if it gives none."""
    messages: list[Any] = list(task["input"]["messages"])
    for _ in range(MAX_CALLS):
        response = client().chat.completions.create(model="vendor-large", messages=messages, max_tokens=24)
        said = response.choices[0].message.content or ""
        word, _, rest = said.partition(": ")
        if word == "answer":
            return rest.strip()
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": f"result: {calculate(rest)}"})
    return ""


if __name__ == "__main__":
    from problems import messages_of

    print(solve({"input": {"messages": messages_of(sys.argv[1])}}))
