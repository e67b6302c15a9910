"""Keeps the last accounts, so that the parts of a page and the next page need not compute them again."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

__all__ = ["Kept"]

_Value = TypeVar("_Value")

_LIVE_S: Final = 5.0
"""How long the account of a rollout without a dataset is kept: its spans and rewards may still arrive."""


class Kept(Generic[_Value]):
    """Values by key, the most recently used ones, up to a total weight; safe for threads."""

    def __init__(self, most: int, weigh: Callable[[_Value], int]) -> None:
        self._most, self._weigh = most, weigh
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[float, int, _Value]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _Value], *, is_live: bool) -> _Value:
        """The value of `key`, made if it is not there; a live one is made again after a few seconds."""
        with self._lock:
            held = self._values.get(key)
            if held is not None and (not is_live or time.monotonic() - held[0] < _LIVE_S):
                self._values.move_to_end(key)
                return held[2]
        value = make()
        with self._lock:
            self._values[key] = (time.monotonic(), self._weigh(value), value)
            self._values.move_to_end(key)
            while len(self._values) > 1 and sum(weight for _, weight, _ in self._values.values()) > self._most:
                self._values.popitem(last=False)
        return value
