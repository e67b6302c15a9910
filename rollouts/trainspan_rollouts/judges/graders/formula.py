"""The formula `calculate_output` of a multi grader: arithmetic on the scores of its graders.

Operators `+ - * / ^`, functions `min max abs floor ceil exp sqrt log`, numbers and the graders' names:
https://platform.openai.com/docs/guides/graders. All values are floats, so that no power takes long, and nothing else is evaluated.
"""

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainspan_schemas.errors import ConfigError, InvalidRecordError

__all__ = ["FUNCTIONS", "Formula"]

_LONGEST: Final = 2000
_DEEPEST: Final = 300
_BINARY: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[float], float]]] = {
    ast.UAdd: lambda value: value,
    ast.USub: lambda value: -value,
}
_ONE: Final[Mapping[str, Callable[[float], float]]] = {
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_SEVERAL: Final[Mapping[str, Callable[[list[float]], float]]] = {"min": min, "max": max}
FUNCTIONS: Final = frozenset({*_ONE, *_SEVERAL})


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula that is known to have only arithmetic and the graders' names."""

    text: str
    tree: ast.expr

    @classmethod
    def parse(cls, where: str, text: str, names: Collection[str]) -> "Formula":
        """Raises ConfigError, which says what cannot be read."""
        if len(text) > _LONGEST:
            raise ConfigError(f"{where} has {len(text)} characters; at most {_LONGEST} are read")
        if "**" in text:
            raise ConfigError(f"{where}: a power is written ^, not **")
        try:
            tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{where}: {text!r:.80} is no formula") from error
        _check(where, tree, names, 0)
        return cls(text, tree)

    def value(self, scores: Mapping[str, float]) -> float:
        """The value. Raises InvalidRecordError if there is none: a division by zero, a root of -1, or beyond all floats."""
        try:
            value = _value(self.tree, scores)
        except (ArithmeticError, ValueError) as error:
            raise InvalidRecordError(f"calculate_output of {_shown(scores)}: {error}") from error
        if not math.isfinite(value):
            raise InvalidRecordError(f"calculate_output of {_shown(scores)} is {value}")
        return value


def _shown(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {score:g}" for name, score in scores.items())


def _check(where: str, node: ast.expr, names: Collection[str], depth: int) -> None:
    if depth > _DEEPEST:
        raise ConfigError(f"{where} is nested too deeply")
    parts: list[ast.expr] = []
    match node:
        case ast.Constant(value=int() | float() as number) if type(number) is not bool:
            if math.isinf(_float(number)):
                raise ConfigError(f"{where}: a number is too large")
        case ast.Name(id=name):
            if name not in names:
                raise ConfigError(f"{where}: no grader {name!r}; there are {', '.join(names)}")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            parts = [left, right]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            parts = [operand]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            if not arguments or (name in _ONE and len(arguments) != 1):
                raise ConfigError(f"{where}: {name} takes {'one value' if name in _ONE else 'values'}")
            parts = arguments
        case _:
            raise ConfigError(
                f"{where}: a formula has names of graders, numbers, + - * / ^ and {', '.join(sorted(FUNCTIONS))} only"
            )
    for part in parts:
        _check(where, part, names, depth + 1)


def _float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _value(node: ast.AST, scores: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=number):
            return _float(number)
        case ast.Name(id=name):
            return scores[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, scores), _value(right, scores))
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand, scores))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            values = [_value(argument, scores) for argument in arguments]
            return _SEVERAL[name](values) if name in _SEVERAL else float(_ONE[name](values[0]))
    raise AssertionError(node)
