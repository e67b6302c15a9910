"""The file of the notes: SQLite, which several viewers can use at once and which survives a crash at any moment.

It belongs to the viewer alone: no other part of trainspan reads it, so that a note can never become a reward.
"""

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from trainspan_processing.text.safe_text import visible
from trainspan_schemas.errors import TrainspanError, UsageError
from trainspan_viewer.queries.notes.subject import Subject

__all__ = ["MOST_BYTES", "Draft", "Note", "NoteChangedError", "NoteError", "NoteFile"]

MOST_BYTES: Final = 4096
"""Of a note's text in UTF-8."""
_MOST_TITLE: Final = 200
_MOST_PAGES: Final = 16_384
"""Of the file: 64 MiB."""
_WAIT_S: Final = 5.0
"""For another viewer that is writing."""
_VERSION: Final = 1
_EMOJI_STYLE: Final = {0xFE0E: None, 0xFE0F: None}
_TABLE: Final = """CREATE TABLE IF NOT EXISTS notes (
  id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, name TEXT NOT NULL, attempt INTEGER, call INTEGER, dataset TEXT,
  title TEXT NOT NULL, first_token INTEGER, last_token INTEGER, text TEXT NOT NULL, written_ns INTEGER NOT NULL, changed_ns INTEGER NOT NULL
)"""
_INDEX: Final = "CREATE INDEX IF NOT EXISTS notes_by_subject ON notes (kind, name)"
_COLUMNS: Final = "id, kind, name, attempt, call, dataset, title, first_token, last_token, text, written_ns, changed_ns"


class NoteError(TrainspanError):
    """A note cannot be read or written."""


class NoteChangedError(NoteError):
    """Somebody else has changed or deleted the note."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A note as a person wrote it."""

    subject: Subject
    title: str
    """Title of the page on which it was written."""
    text: str
    tokens: tuple[int, int] | None = None
    """First and last token of a call's answer, from 0."""


@dataclass(frozen=True, slots=True)
class Note:
    """A stored note."""

    id: int
    draft: Draft
    written_ns: int
    changed_ns: int


class NoteFile:
    """Notes in a file of mode 0600, which the first note creates."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def about(self, subject: Subject, *, most: int = 50) -> list[Note]:
        """The newest notes on `subject`; those on a rollout include those on its calls. Raises NoteError."""
        kinds = ("rollout", "call") if subject.kind == "rollout" else (subject.kind,)
        where = f"kind IN ({', '.join('?' * len(kinds))}) AND name = ? AND attempt IS ?"
        values: list[Any] = [*kinds, subject.name, subject.attempt]
        if subject.kind == "call":
            where, values = f"{where} AND call = ?", [*values, subject.call]
        return self._selected(f"WHERE {where} ORDER BY id DESC LIMIT ?", [*values, most])

    def newest(self, start: int, most: int, *, text: str = "") -> tuple[list[Note], int]:
        """The notes from number `start`, newest first, whose text or title contains `text`; and their number."""
        where = "WHERE instr(lower(text), lower(?)) OR instr(lower(title), lower(?))"
        notes = self._selected(f"{where} ORDER BY id DESC LIMIT ? OFFSET ?", [text, text, most, start])
        if not self.path.exists():
            return [], 0
        with self._opened(is_writing=False) as connection:
            if _version(connection) == 0:
                return [], 0
            total = connection.execute(f"SELECT count(*) FROM notes {where}", [text, text]).fetchone()[0]
        return notes, int(total)

    def add(self, draft: Draft) -> None:
        """Raises UsageError for a text that is empty or too long, NoteError if it cannot be written."""
        subject, tokens, now = draft.subject, draft.tokens or (None, None), time.time_ns()
        row = (subject.kind, subject.name, subject.attempt, subject.call, subject.dataset, draft.title[:_MOST_TITLE])
        values = [*row, *tokens, _cleaned(draft.text), now, now]
        with self._opened(is_writing=True) as connection:
            columns = _COLUMNS.removeprefix("id, ")
            connection.execute(f"INSERT INTO notes ({columns}) VALUES ({', '.join('?' * len(values))})", values)

    def change(self, id_: int, seen_ns: int, text: str) -> None:
        """Replaces the text of a note that was read when it was last changed at `seen_ns`. Raises as `add`."""
        values = (_cleaned(text), time.time_ns(), id_, seen_ns)
        self._write("UPDATE notes SET text = ?, changed_ns = ? WHERE id = ? AND changed_ns = ?", values)

    def delete(self, id_: int, seen_ns: int) -> None:
        """Deletes a note, also from the bytes of the file. Raises NoteError."""
        self._write("DELETE FROM notes WHERE id = ? AND changed_ns = ?", (id_, seen_ns))

    def _create(self) -> None:
        """Makes an empty file if there is none.

        It gets its name after it was closed: closing a file releases all locks that the process has on it, those of SQLite too.
        """
        if self.path.exists():
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        empty = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        os.close(os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with contextlib.suppress(FileExistsError):
                os.link(empty, self.path)
        finally:
            empty.unlink()

    def _write(self, sql: str, values: Sequence[object]) -> None:
        if not self.path.exists():
            raise NoteChangedError("there is no such note")
        with self._opened(is_writing=True) as connection:
            if connection.execute(sql, values).rowcount != 1:
                raise NoteChangedError("the note was changed or deleted meanwhile: load the page again")

    def _selected(self, rest: str, values: Sequence[object]) -> list[Note]:
        if not self.path.exists():
            return []
        with self._opened(is_writing=False) as connection:
            if _version(connection) == 0:
                return []
            return [_note(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM notes {rest}", values)]

    @contextlib.contextmanager
    def _opened(self, *, is_writing: bool) -> Iterator[sqlite3.Connection]:
        """A connection with one transaction. Raises NoteError if the file cannot be used."""
        doing = "written" if is_writing else "read"
        try:
            if is_writing:
                self._create()
            address = f"file:{quote(str(self.path.absolute()))}?mode=rw"  # which never makes a file
            connection = sqlite3.connect(address, timeout=_WAIT_S, isolation_level=None, uri=True)
            with contextlib.closing(connection):
                connection.execute("PRAGMA secure_delete = ON")
                connection.execute(f"PRAGMA max_page_count = {_MOST_PAGES}")
                connection.execute("BEGIN IMMEDIATE" if is_writing else "BEGIN")
                _check_version(connection)
                if is_writing:
                    _make_table(connection)
                yield connection
                connection.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise NoteError(f"notes cannot be {doing}: {self.path}: {reason}") from error


def _check_version(connection: sqlite3.Connection) -> None:
    """Raises NoteError for the file of a newer version."""
    if (version := _version(connection)) > _VERSION:
        raise NoteError(f"notes have version {version}: a newer trainspan wrote them; this one reads up to {_VERSION}")


def _make_table(connection: sqlite3.Connection) -> None:
    """In a new file."""
    if _version(connection) == 0:
        connection.execute(_TABLE)
        connection.execute(_INDEX)
        connection.execute(f"PRAGMA user_version = {_VERSION}")


def _version(connection: sqlite3.Connection) -> int:
    """0 in a file without a table."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _cleaned(text: str) -> str:
    """The text as pages show it, so that editing it changes nothing else. Raises UsageError."""
    lines = text.translate(_EMOJI_STYLE).replace("\r\n", "\n").replace("\r", "\n")
    shown = visible(lines).strip()
    if not shown:
        raise UsageError("the note is empty")
    if (size := len(shown.encode())) > MOST_BYTES:
        raise UsageError(f"the note has {size} bytes; at most {MOST_BYTES} are allowed")
    return shown


def _note(row: Sequence[Any]) -> Note:
    id_, kind, name, attempt, call, dataset, title, first, last, text, written_ns, changed_ns = row
    subject = Subject(kind, name, attempt, call, dataset)
    tokens = None if first is None else (first, last)
    return Note(id_, Draft(subject, title, text, tokens), written_ns, changed_ns)
