"""The parameters of an address: names in its path and in its query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar
from urllib.parse import urlencode

from trainspan_schemas.errors import UsageError

__all__ = ["Params", "Part"]

_Choice = TypeVar("_Choice", bound=str)
_LONGEST = 20_000


class Part(NamedTuple):
    """The part of a list that a page shows."""

    start: int
    size: int
    """Of a part; the last one may have less."""
    total: int


@dataclass(frozen=True, slots=True)
class Params:
    """Text by name; a value that cannot be read raises UsageError, which the server answers with 400."""

    address: str
    """The path, percent-encoded as it was asked."""
    path: Mapping[str, str]
    query: Mapping[str, Sequence[str]]

    def text(self, name: str, default: str = "") -> str:
        """The value in the path, else the first one in the query."""
        value = self.path.get(name) or (self.query.get(name) or [default])[0]
        if len(value) > _LONGEST:
            raise UsageError(f"{name} has {len(value)} characters; at most {_LONGEST} are allowed")
        return value

    def all(self, name: str) -> list[str]:
        """All values in the query that are not empty."""
        return [value for value in self.query.get(name, ()) if value]

    def integer(self, name: str, default: int, least: int = 0, most: int = 10**15) -> int:
        """A number in this range; values outside become its ends."""
        text = self.text(name)
        try:
            return min(max(int(text), least), most) if text else default
        except ValueError as error:
            raise UsageError(f"{name} = {text[:80]!r} is not a whole number") from error

    def number(self, name: str) -> float | None:
        """A finite number; None if there is none."""
        text = self.text(name)
        try:
            value = float(text) if text else None
        except ValueError as error:
            raise UsageError(f"{name} = {text[:80]!r} is not a number") from error
        if value is not None and value - value != 0:
            raise UsageError(f"{name} = {text[:80]!r} is not finite")
        return value

    def choice(self, name: str, choices: Sequence[_Choice], default: _Choice) -> _Choice:
        """One of `choices`."""
        text = self.text(name, default)
        chosen = next((choice for choice in choices if choice == text), None)
        if chosen is None:
            raise UsageError(f"{name} = {text[:80]!r} is not one of {', '.join(choices)}")
        return chosen

    def link(self, **changes: str | float | None) -> str:
        """The same address with other values in the query; None and "" remove one."""
        query = {name: list(values) for name, values in self.query.items()}
        query |= {name: [] if value in (None, "") else [str(value)] for name, value in changes.items()}
        encoded = urlencode([(name, value) for name, values in query.items() for value in values if value])
        return f"{self.address}?{encoded}" if encoded else self.address
