"""Reads JSON in attributes, which a length limit may have cut and a stranger may have written."""

import json
import re
from typing import Any, Final

__all__ = ["begins_like_json", "parsed"]

_MOST_NESTED: Final = 200
"""Levels; what is nested deeper cannot be walked or written again by recursion."""
_BEGIN: Final = re.compile(r'\s*(?:\{\s*"|(?:\[\s*)+[{"]|(?:\[\s*){9})')


def parsed(value: Any) -> Any:
    """JSON text as its value, None if it is no JSON or is nested more than 200 levels deep; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        parsed_value = json.loads(value)
    except (ValueError, RecursionError):
        return None
    may_be_deep = value.count("[") + value.count("{") > _MOST_NESTED
    return None if may_be_deep and _is_deep(parsed_value) else parsed_value


def begins_like_json(text: str) -> bool:
    """Whether a text begins as a JSON object, a list of objects or texts, or a list of many levels does."""
    return _BEGIN.match(text) is not None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_NESTED):
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True
