r"""Text that UTF-8 cannot hold: half characters (lone surrogates), as `os.listdir` or a truncated `"\ud83d"` give them.

Protobuf, headers and Arrow refuse such text. It is escaped, `\udc80`, so that different names stay different; text for a
model gets U+FFFD instead.
"""

import functools
import logging
import re
from typing import Any, Final

__all__ = ["escaped", "well_formed"]

_HALF: Final = re.compile("[\ud800-\udfff]")
_LOGGER: Final = logging.getLogger("trainspan")


def escaped(text: str, replacement: str | None = None) -> str:
    r"""Returns `text` with each half character as `\udc80`, or as `replacement`; `text` itself if it has none."""
    if text.isascii() or not _HALF.search(text):
        return text
    return _HALF.sub(lambda half: replacement or f"\\u{ord(half[0]):04x}", text)


def well_formed(value: Any, source: str, replacement: str | None = None) -> Any:
    """Returns a JSON value from `source`, such as `FILE:LINE`, with all its texts and keys escaped; logs each source once."""
    if isinstance(value, str):
        text = escaped(value, replacement)
        if text is not value:
            _log(source, "replaced" if replacement else "escaped")
        return text
    if isinstance(value, dict):
        return {
            well_formed(key, source, replacement): well_formed(item, source, replacement) for key, item in value.items()
        }
    return [well_formed(item, source, replacement) for item in value] if isinstance(value, list) else value


@functools.cache
def _log(source: str, what: str) -> None:
    _LOGGER.warning("event=half_characters source=%s; text that is not valid Unicode is %s", source, what)
