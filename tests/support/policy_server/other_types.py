"""JSON values with the wrong type at each place, as a hostile client may send them."""

from collections.abc import Iterator
from typing import Any

__all__ = ["with_other_types"]

_VALUES = (None, True, 0, 1.5, "", "text", [], [[]], {}, [{}], {"a": []})


def with_other_types(value: Any) -> Iterator[Any]:
    """Copies of a JSON object or list, each with one place in it, at any depth, that has a value of another type."""
    places: Iterator[tuple[Any, Any]] = iter(value.items() if isinstance(value, dict) else enumerate(value))
    for key, inner in places:
        deeper = with_other_types(inner) if isinstance(inner, dict | list) else ()
        for other in (*_VALUES, *deeper):
            if isinstance(value, dict):
                yield {**value, key: other}
            else:
                yield [*value[:key], other, *value[key + 1 :]]
