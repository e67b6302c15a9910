"""The parameters of a named read, checked: every error names the read or the parameter and its value."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainspan_schemas.errors import UsageError

__all__ = ["ReadParameters"]


@dataclass(frozen=True, slots=True)
class ReadParameters:
    """The parameters that a client gave to a read. All methods raise UsageError for a value of another type."""

    read: str
    values: dict[str, object]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def expect(self, *known: str) -> None:
        """Raises UsageError if there is any other parameter."""
        if unknown := [key for key in self.values if key not in known]:
            raise UsageError(f"read {self.read!r} has no parameter {unknown[0]!r}; parameters are {', '.join(known)}")

    def require(self, key: str) -> None:
        """Raises UsageError without the parameter."""
        if key not in self.values:
            raise UsageError(f"the read {self.read!r} needs the parameter {key}")

    def text(self, key: str) -> str:
        value = self.values[key]
        if not isinstance(value, str):
            raise _not_of_type(key, value, "str")
        return value

    def flag(self, key: str) -> bool:
        """False without the parameter."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise _not_of_type(key, value, "bool")
        return value

    def integer(self, key: str) -> int:
        value = self.values[key]
        if not isinstance(value, int) or isinstance(value, bool):
            raise _not_of_type(key, value, "int")
        return value

    def integer_within(self, key: str, default: int, least: int, most: int) -> int:
        """The integer, from `least` to `most`; `default` without the parameter."""
        value = self.integer(key) if key in self.values else default
        if not least <= value <= most:
            raise UsageError(f"parameter {key} = {value!r} is not between {least} and {most}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values[key]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"parameter {key} = {value!r} is not a list of strings")
        return value

    def columns(self, known: Sequence[str]) -> Sequence[str]:
        """The columns asked for, all of `known` by default. Raises UsageError if a column is unknown, or if none is named."""
        if "columns" not in self.values:
            return known
        wanted = self.texts("columns")
        if not wanted:
            raise UsageError(f"read {self.read!r}: columns is empty")
        if unknown := [column for column in wanted if column not in known]:
            raise UsageError(f"read {self.read!r} has no column {unknown[0]!r}; columns are {', '.join(known)}")
        return wanted


def _not_of_type(key: str, value: object, type_: str) -> UsageError:
    return UsageError(f"parameter {key} = {value!r} is not of type {type_}")
