"""Where the parts of a dataset are computed: in this process, or as tasks elsewhere (ray_engine.py)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from trainspan_processing.read.source import Source

__all__ = ["Engine", "OneProcess"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Engine(Protocol):
    """Applies work to items that do not depend on each other."""

    @property
    def is_spread(self) -> bool:
        """Whether other machines than this one do the work."""
        ...

    def map(
        self, source: Source, work: Callable[[Source, _Item], _Result], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        """The results, in the order of the items. Work may be repeated, so its effects must be the same each time.

        Work, items and results can be pickled. Propagates the errors that work raises.
        """
        ...


class OneProcess:
    """Works in this process, one item after another."""

    is_spread = False

    def map(
        self, source: Source, work: Callable[[Source, _Item], _Result], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        for item in items:
            yield work(source, item)
