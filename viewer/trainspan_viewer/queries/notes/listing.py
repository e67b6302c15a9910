"""The list of all notes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainspan_viewer.queries.notes.note_file import Note, NoteFile
from trainspan_viewer.queries.params import Params

__all__ = ["NotesModel", "load_notes"]

_PAGE: Final = 50


@dataclass(frozen=True, slots=True)
class NotesModel:
    """The notes from number `start`, newest first."""

    notes: Sequence[Note]
    start: int
    page_size: int
    n_found: int
    text: str
    """What the reader searches for."""
    params: Params


def load_notes(note_file: NoteFile, params: Params) -> NotesModel:
    """Raises NoteError if the file cannot be read."""
    start, text = params.integer("from", 0), params.text("text").strip()
    notes, n_found = note_file.newest(start, _PAGE, text=text)
    return NotesModel(notes, start, _PAGE, n_found, text, params)
