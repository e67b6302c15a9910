"""The calculator: exact arithmetic with + - * / and parentheses."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_CHARACTERS = 80


def calculate(expression: str) -> str:
    """Computes an expression, e.g. 3*4+2."""
    try:
        if len(expression) > MAX_CHARACTERS:
            return "error"
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return "error"


def _value(node: ast.expr) -> Fraction:
    """Raises ValueError for anything but numbers, + - * / and parentheses."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    raise ValueError("not arithmetic")
