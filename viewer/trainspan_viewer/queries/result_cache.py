"""Keeps recent results, so that the parts of a page and the next page need not compute them again."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Final, Generic, TypeVar

__all__ = ["ResultCache", "weight_of"]

_Value = TypeVar("_Value")

_NUMBER: Final = 40
"""Bytes of a number and its place in a list."""
_LIVE_S: Final = 5.0
"""How long the account of a rollout without a dataset is kept: its spans and rewards may still arrive."""
_PAST_S: Final = 30.0
"""How long other accounts are kept: what the store holds of them may still be completed or deleted."""


def weight_of(value: object) -> int:
    """About how many bytes of memory a value takes with all that it holds: dataclasses, mappings, sequences, texts, numbers."""
    if isinstance(value, str | bytes):
        return 56 + len(value)
    if is_dataclass(value):
        return 56 + sum(weight_of(getattr(value, item.name)) for item in fields(value))
    if isinstance(value, Mapping):
        return 64 + sum(weight_of(key) + weight_of(content) for key, content in value.items())
    if isinstance(value, Sequence | Set):
        # Tokens and their log-probabilities: looking at each of millions would take seconds.
        is_flat = isinstance(value, list) and value and isinstance(value[0], int | float)
        return 56 + (_NUMBER * len(value) if is_flat else 8 * len(value) + sum(map(weight_of, value)))
    return _NUMBER


class ResultCache(Generic[_Value]):
    """Values by key, the most recently used ones, up to `most` bytes in total; safe for threads."""

    def __init__(self, most: int, weigh: Callable[[_Value], int] = weight_of) -> None:
        self._most, self._weigh = most, weigh
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[float, int, _Value]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _Value], *, is_live: bool) -> _Value:
        """The value of `key`, made if it is not there or too old; a live one is soon too old."""
        with self._lock:
            now = time.monotonic()
            for old in [name for name, (until, _, _) in self._values.items() if until <= now]:
                del self._values[old]
            if (entry := self._values.get(key)) is not None:
                self._values.move_to_end(key)
                return entry[2]
        value = make()
        with self._lock:
            until = time.monotonic() + (_LIVE_S if is_live else _PAST_S)
            self._values[key] = (until, self._weigh(value), value)
            self._values.move_to_end(key)
            while len(self._values) > 1 and sum(weight for _, weight, _ in self._values.values()) > self._most:
                self._values.popitem(last=False)
        return value

    def clear(self) -> None:
        """Forgets all values."""
        with self._lock:
            self._values.clear()
