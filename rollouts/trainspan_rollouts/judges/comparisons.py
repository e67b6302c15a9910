"""Compares an answer with the right one: texts, numbers, JSON and tool calls. Each comparison returns why they differ, or None."""

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from trainspan_schemas.errors import InvalidRecordError

__all__ = [
    "Number",
    "Tolerance",
    "differing_calls",
    "differing_number",
    "differing_text",
    "last_number",
    "parse_json",
    "same_json",
    "tool_calls",
]

_LONGEST: Final = 400
"""Digits of a number, and its greatest exponent: an answer may have a million."""
_RELATIVE: Final = Fraction(1, 10**9)
_SHOWN: Final = 120

_SEPARATOR: Final = re.compile(r"(?<=\d)['’_\u00a0\u2009\u202f](?=\d)")
_DIGITS: Final = re.compile(r"\d+(\.\d+)?|\d{1,3}(,\d{3})+(\.\d+)?|\.\d+")
_ONE: Final = r"(?:(?<![\w)\]])[+-])?[$€£¥]?(?:(?<!\w)\.\d+|(?<![A-Za-z_.\d#])[\d#](?:[\d#.,]*[\d#])?)(?:[eE][+-]?\d+)?"
_NUMBER: Final = re.compile(rf"({_ONE})(?:\s?/\s?({_ONE}))?")
_UNIT_END: Final = re.compile(r"$|[\s.,;:!?)\]]")


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a text, exactly as written."""

    value: Fraction | None
    """None if its digits are no number, such as `1,23,4` or `10²`."""
    rest: str
    """The text behind it, which begins with its unit."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a number may be from the right one. By default integers must be equal, others within a billionth of the right one."""

    absolute: Fraction | None = None
    relative: Fraction | None = None

    @classmethod
    def parse(cls, text: str) -> "Tolerance":
        """Parses `0.01`, or `1%` of the right number. Raises ValueError."""
        value = Fraction(text.removesuffix("%"))
        if value < 0:
            raise ValueError(f"{text} is negative")
        return cls(relative=value / 100) if text.endswith("%") else cls(absolute=value)

    def admits(self, value: Fraction, right: Fraction) -> bool:
        if self.absolute is not None:
            return abs(value - right) <= self.absolute
        if self.relative is None and value.denominator == right.denominator == 1:
            return value == right
        return abs(value - right) <= (_RELATIVE if self.relative is None else self.relative) * abs(right)


def differing_text(right: Any, answer: Any, *, ignore_case: bool = False) -> str | None:
    """Texts are equal by Unicode's canonical equivalence (NFC) without outer white space; other values are equal as JSON.

    If one is a text and the other is not, the text is read as JSON.
    """
    if isinstance(right, str) and isinstance(answer, str):
        expected, given = (unicodedata.normalize("NFC", text.strip()) for text in (right, answer))
        equal = expected.casefold() == given.casefold() if ignore_case else expected == given
    elif isinstance(right, str) or isinstance(answer, str):
        text, value = (right, answer) if isinstance(right, str) else (answer, right)
        try:
            equal = same_json(parse_json(text), value)
        except ValueError:
            equal = False
    else:
        equal = same_json(right, answer)
    return None if equal else f"{_shown(answer)} is not {_shown(right)}"


def differing_number(right: Any, answer: Any, tolerance: Tolerance) -> str | None:
    """Compares the last number of the answer with that of `right`, whose unit, if it states one, must follow the number.

    Raises InvalidRecordError if `right` has no number.
    """
    wanted = last_number(right)
    if wanted is None or wanted.value is None:
        raise InvalidRecordError(f"{_shown(right)} is no number")
    last = last_number(answer)
    if last is None:
        return f"{_shown(answer)} has no number"
    if last.value is None:
        return f"the last number of {_shown(answer)} cannot be read"
    if not tolerance.admits(last.value, wanted.value):
        return f"{_written(last.value)} is not {_written(wanted.value)}"
    unit, rest = wanted.rest.strip(), last.rest.lstrip()
    if unit and not (rest.startswith(unit) and _UNIT_END.match(rest, len(unit))):
        return f"the unit {unit!r} does not follow the number {_written(last.value)}"
    return None


def last_number(value: Any) -> Number | None:
    """The last number in a text, or the value itself if it is one; None if there is none. True, false and NaN are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    text = unicodedata.normalize("NFC", value if isinstance(value, str) else repr(value))
    text = _SEPARATOR.sub(",", text.replace("\u2212", "-").replace("\u2044", "/"))
    text = "".join("#" if mark.isnumeric() and not mark.isdecimal() else mark for mark in text)
    match = None
    for match in _NUMBER.finditer(text):  # noqa: B007 - the last one
        pass
    if match is None:
        return None
    numerator, denominator = _fraction(match[1]), Fraction(1) if match[2] is None else _fraction(match[2])
    rest = text[match.end() :]
    return Number(numerator / denominator if numerator is not None and denominator else None, rest)


def _fraction(written: str) -> Fraction | None:
    digits, _, exponent = written.lower().lstrip("+-$€£¥").partition("e")
    if not _DIGITS.fullmatch(digits) or len(digits) > _LONGEST:
        return None
    power = exponent.lstrip("+-").lstrip("0") or "0"
    if len(power) > len(str(_LONGEST)) or int(power) > _LONGEST:
        return None  # a power of ten with so many digits would take forever
    value = Fraction(digits.replace(",", "")) * Fraction(10) ** (
        -int(power) if exponent.startswith("-") else int(power)
    )
    return -value if written.startswith("-") else value


def _written(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: 1 and 1.0 are, true and 1 are not, NaN is nothing's equal."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_json(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_json, one, other))
    return (type(one) in (int, float) and type(other) in (int, float) and one == other) or (
        type(one) is type(other) and one == other
    )


def parse_json(text: str) -> Any:
    """Parses JSON without NaN and infinity, which are none, nor numbers that a double cannot hold. Raises ValueError."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    def finite(digits: str) -> float:
        if math.isinf(number := float(digits)):
            raise ValueError(f"{digits:.40} is too large")
        return number

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def tool_calls(value: Any) -> list[tuple[str, Any]]:
    """Name and arguments of the tool calls in a value: a call, a list of calls, a message with `tool_calls`, or JSON of these.

    A call is `{"name": …, "arguments": …}`, alone or as `function`; arguments in a text are read as JSON.
    Empty for a text that is no JSON: its agent called nothing. Raises ValueError for anything else.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return []
    if isinstance(value, Mapping) and "tool_calls" in value:
        value = value["tool_calls"] or []
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return []
    return [_call(call) for call in calls]


def _call(call: Any) -> tuple[str, Any]:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ValueError(f"{_shown(call)} is no tool call")
    arguments = inner.get("arguments", {})
    return inner["name"], parse_json(arguments or "{}") if isinstance(arguments, str) else arguments


def differing_calls(right: Sequence[tuple[str, Any]], calls: Sequence[tuple[str, Any]]) -> str | None:
    """Whether these are the right calls, in any order: equal names, and arguments that are equal as JSON."""
    left = list(calls)
    for name, arguments in right:
        index = next(
            (i for i, (other, given) in enumerate(left) if other == name and same_json(given, arguments)), None
        )
        if index is None:
            return f"no call {name}({_shown(arguments)}) among {len(calls)}"
        del left[index]
    return f"a call too many: {left[0][0]}({_shown(left[0][1])})" if left else None


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
