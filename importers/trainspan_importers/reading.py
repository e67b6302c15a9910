"""What a format is: how its files are recognized, and the reader of their records."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from trainspan_importers.account import Account
from trainspan_importers.traces import SHAPE_ERRORS, Item, fault_of
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["Converted", "Format", "Reader", "each"]

Converted = Item | InvalidRecordError
"""What a record became, or why a part of it became nothing."""


class Reader(Protocol):
    """Reads the records of all files of one format, file by file."""

    def add(self, value: Any) -> Iterator[Converted]:
        """What the next record becomes. Raises one of SHAPE_ERRORS (traces.py) if it is no record of the format."""
        ...

    def end_of_file(self) -> Iterator[Converted]:
        """What only a whole file shows."""
        return iter(())

    def end(self) -> Iterator[Converted]:
        """What only all files together show."""
        return iter(())


def each(items: Iterable[Any], add: Callable[[Any], Iterator[Converted]]) -> Iterator[Converted]:
    """What the items of a page become. One that is broken costs only itself."""
    for item in items:
        try:
            yield from list(add(item))
        except SHAPE_ERRORS as error:
            yield fault_of(error)


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    name: str
    title: str
    recognizes: Callable[[Any], bool]
    """Whether a value can be a record of the format, and of no other one."""
    reader: Callable[[Account], Reader]
    comes_first: Callable[[Any], bool] = lambda _value: False
    """Whether files with such records are read before the others: they are about the others' records."""
    has_identities: bool = False
    """Whether its spans may be of rollouts already."""
