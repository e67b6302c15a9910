"""What a form sent: fields with text, bounded and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote

from trainspan_schemas.errors import UsageError
from trainspan_viewer.queries.notes.note_file import Draft
from trainspan_viewer.queries.notes.subject import KINDS, Subject

__all__ = ["Submission"]

_MOST_FIELDS: Final = 20
_MOST_NAME: Final = 4000
_MOST_NUMBER: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Submission:
    """The fields of a form by name."""

    fields: Mapping[str, str]

    @classmethod
    def of_body(cls, body: bytes) -> "Submission":
        """From the content of a POST request with `application/x-www-form-urlencoded`. Raises UsageError."""
        try:
            pairs = parse_qsl(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError as error:
            raise UsageError(f"the form has more than {_MOST_FIELDS} fields") from error
        return cls(dict(pairs))

    @property
    def text(self) -> str:
        """What the person wrote."""
        return self.fields.get("text", "")

    @property
    def back(self) -> str:
        """The page that the form was on; the list of notes if it is no path on this server."""
        path = self.fields.get("back", "")
        is_own = path.startswith("/") and path[1:2] not in ("/", "\\") and path.isascii() and path.isprintable()
        return path if is_own else "/notes"

    @property
    def seen_ns(self) -> int:
        """When the note that the person saw was last changed."""
        return self._number("seen") or 0

    @property
    def draft(self) -> Draft:
        """The note. Raises UsageError."""
        kind, name = self.fields.get("kind", ""), unquote(self.fields.get("name", ""))  # as notes_part writes it
        if kind not in KINDS:
            raise UsageError(f"a note is about one of {', '.join(KINDS)}, not {kind[:40]!r}")
        if not name or len(name) > _MOST_NAME:
            raise UsageError(f"the name of the {kind} has {len(name)} characters; 1 to {_MOST_NAME} are allowed")
        is_call = kind == "call"
        attempt = self._number("attempt") if kind in ("rollout", "call") else None
        call = self._number("call") if is_call else None
        if is_call and call is None:
            raise UsageError("the note names no call")
        dataset = self.fields.get("dataset", "")[:_MOST_NAME] or None
        tokens = self._tokens() if is_call else None
        return Draft(Subject(kind, name, attempt, call, dataset), self.fields.get("title", ""), self.text, tokens)

    def _tokens(self) -> tuple[int, int] | None:
        first, last = self._number("first"), self._number("last")
        if first is None and last is None:
            return None
        start = first if first is not None else last
        end = last if last is not None else first
        assert start is not None
        assert end is not None
        if end < start:
            raise UsageError(f"the tokens {start} to {end} are none: the first one comes after the last one")
        return start, end

    def _number(self, name: str) -> int | None:
        text = self.fields.get(name, "").strip()
        if not text:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= _MOST_NUMBER):
            raise UsageError(f"{name} = {text[:40]!r} is not a whole number from 0")
        return int(text)
