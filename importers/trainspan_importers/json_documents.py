"""JSON documents whose list of records is read piece by piece, so that memory does not grow with the file."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.utf8 import well_formed

__all__ = ["document_records"]

_LISTS: Final = ("data", "batches", "resourceSpans", "resource_spans", "observations", "scores", "runs", "feedback")
"""Members whose elements are records of their own."""
_CHUNK: Final = 1024 * 1024
_SPACE: Final = re.compile(r"[ \t\r\n]*")


def document_records(stream: BinaryIO, most_bytes: int) -> Iterator[tuple[int, Any]]:
    """(line, value) of each record: the elements of a list, and an object's members of `_LISTS` as `{NAME: [element]}` each.

    The other members of the object come last, together. Where the text is no JSON, or a value has more than `most_bytes`
    characters, the value is an InvalidRecordError, and it is the last one.
    """
    text = _Text(stream, most_bytes)
    try:
        while text.peek():
            if text.peek() == "[":
                yield from ((line, value) for line, value in text.elements())
            elif text.peek() == "{":
                yield from _members(text)
            else:
                yield text.line, text.value()
    except InvalidRecordError as error:
        yield text.line, InvalidRecordError(f"{error}; the rest of the file is left out")


def _members(text: "_Text") -> Iterator[tuple[int, Any]]:
    first, rest = text.line, {}
    text.take("{")
    while text.peek() != "}":
        name = text.value()
        text.take(":")
        if name in _LISTS and text.peek() == "[":
            yield from ((line, {name: [value]}) for line, value in text.elements())
        else:
            rest[name] = text.value()
        if text.peek() != ",":
            break
        text.take(",")
    text.take("}")
    if rest:
        yield first, rest


class _Text:
    """The text of a stream from a place on, which moves forward."""

    def __init__(self, stream: BinaryIO, most: int) -> None:
        self._stream, self._most = stream, most
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._counted = "", 0, 0
        self._line, self._is_done = 1, False

    @property
    def line(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise InvalidRecordError(
                f"not JSON: {self._text[self._at : self._at + 20]!r} where {character!r} should be"
            )
        self._at += 1

    def elements(self) -> Iterator[tuple[int, Any]]:
        """(line, value) of each element of the list that is next."""
        self.take("[")
        while self.peek() != "]":
            self.peek()
            line = self.line
            yield line, self.value()
            if self.peek() != ",":
                break
            self.take(",")
        self.take("]")

    def value(self) -> Any:
        """The value that is next, however many pieces it is in."""
        self.peek()
        n_wanted = _CHUNK
        while True:
            try:
                value, end = self._scan(self._text, self._at)
                if end < len(self._text) or self._is_done:  # a number may go on in the next piece
                    has_halves = "\\ud" in self._text[self._at : end].lower()
                    self._at = end
                    return well_formed(value, "import", "\ufffd") if has_halves else value
            except RecursionError:
                raise InvalidRecordError("nested too deeply") from None
            except ValueError as error:
                if self._is_done:
                    raise InvalidRecordError(f"not JSON: {error}") from None
            if len(self._text) - self._at > self._most:
                raise InvalidRecordError(f"a value of more than {self._most >> 20} MiB")
            while len(self._text) - self._at < n_wanted and self._read():
                pass
            n_wanted *= 2

    def _read(self) -> bool:
        """Reads another piece, and forgets what was passed; False at the end."""
        if self._is_done:
            return False
        chunk = self._stream.read(_CHUNK)
        self._is_done = not chunk
        _ = self.line
        self._text = self._text[self._at :] + self._decode(chunk, self._is_done)
        self._at = self._counted = 0
        return not self._is_done
