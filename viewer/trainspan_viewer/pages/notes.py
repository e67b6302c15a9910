"""Notes: those on the subject of a page with forms that write, and the list of all."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, isolated, link
from trainspan_viewer.html.formats import moment
from trainspan_viewer.html.paging import paging
from trainspan_viewer.queries.notes.listing import NotesModel
from trainspan_viewer.queries.notes.note_file import MOST_BYTES, Note
from trainspan_viewer.queries.notes.subject import Subject

__all__ = ["Desk", "notes_part", "refused_note", "render_notes"]


@dataclass(frozen=True, slots=True)
class Desk:
    """What forms on a page need to write."""

    token: str | None
    """Proves that a form is the server's own; None: nobody may write."""
    back: str
    """The page's own address."""


def notes_part(notes: Sequence[Note], subject: Subject, title: str, desk: Desk, error: str = "") -> Element | None:
    """The notes on the subject of a page, and a form for another one; None if there is nothing to show."""
    parts: list[Child] = [element("p", error, class_="bad", role="alert")] if error else []
    parts += [_note(note, desk, subject) for note in notes]
    if desk.token is not None:
        parts.append(_new(subject, title, desk))
    return element("section", *parts, id="notes", class_="notes", aria_label="notes") if parts else None


def render_notes(model: NotesModel, desk: Desk) -> Page:
    """The list of all notes."""
    search = element(
        "form",
        element("label", "search in notes", element("input", type="search", name="text", value=model.text)),
        element("button", "show", type="submit"),
        link("/notes", "clear"),
        method="get",
        class_="filters",
    )
    empty = (
        "No note has this text."
        if model.text
        else "No notes yet: the pages of runs, datasets, groups, rollouts and calls have a form."
    )
    body: list[Child] = [
        search if model.n_found or model.text else None,
        element("div", *(_note(note, desk, None) for note in model.notes), class_="notes")
        if model.notes
        else element("p", empty, class_="note"),
        paging(model.params.link, model.start, model.page_size, model.n_found, "notes"),
    ]
    return Page("Notes", body, section="notes")


def refused_note(reason: str, text: str) -> Page:
    """Why nothing was written, with what the person wrote."""
    draft = [element("p", "You wrote:"), element("pre", text[: 4 * MOST_BYTES], dir="auto")] if text else []
    return Page("The note was not written", [element("p", reason, class_="bad", role="alert"), *draft], section="notes")


def _note(note: Note, desk: Desk, page: Subject | None) -> Element:
    """A note on the page of its subject `page`; None: in the list, with a link."""
    draft = note.draft
    is_elsewhere = page is None or page.kind != draft.subject.kind
    about: list[Child] = (
        [link(draft.subject.address, isolated(draft.title or draft.subject.kind)), " · "] if is_elsewhere else []
    )
    if draft.tokens:
        first, last = draft.tokens
        about.append(f"token {first} · " if first == last else f"tokens {first} to {last} · ")
    about.append(f"{moment(note.written_ns)} UTC")
    if note.changed_ns != note.written_ns:
        about.append(f", changed {moment(note.changed_ns)}")
    return element(
        "article",
        element("pre", draft.text, dir="auto"),
        element("p", *about, class_="note"),
        _edit(note, desk) if desk.token is not None else None,
        id=f"note-{note.id}",
    )


def _edit(note: Note, desk: Desk) -> Element:
    seen = element("input", type="hidden", name="seen", value=note.changed_ns)
    return element(
        "details",
        element("summary", "edit"),
        element(
            "form",
            *_hidden(desk),
            seen,
            _box(note.draft.text, "text of the note"),
            element("button", "save", type="submit"),
            element("button", "delete", type="submit", formaction=f"/notes/{note.id}/delete", formnovalidate=True),
            method="post",
            action=f"/notes/{note.id}",
        ),
        id=f"edit-{note.id}",
    )


def _new(subject: Subject, title: str, desk: Desk) -> Element:
    fields = {
        "kind": subject.kind,
        "name": quote(subject.name, safe=""),  # invisible characters would be shown as signs
        "attempt": subject.attempt,
        "call": subject.call,
        "dataset": subject.dataset,
        "title": title,
    }
    tokens = [
        element("label", label, element("input", name=name, inputmode="numeric", pattern="[0-9]*", size=6))
        for name, label in (("first", "tokens from"), ("last", "to"))
    ]
    return element(
        "details",
        element("summary", "add a note"),
        element(
            "form",
            *_hidden(desk),
            *(
                element("input", type="hidden", name=name, value=value)
                for name, value in fields.items()
                if value is not None
            ),
            _box("", f"note on this {subject.kind}"),
            *(tokens if subject.kind == "call" else []),
            element("button", "add", type="submit"),
            method="post",
            action="/notes",
        ),
        id="add-note",
    )


def _hidden(desk: Desk) -> list[Element]:
    values = {"token": desk.token, "back": desk.back}
    return [element("input", type="hidden", name=name, value=value) for name, value in values.items()]


def _box(text: str, label: str) -> Element:
    return element(
        "textarea", text, name="text", rows=3, required=True, maxlength=MOST_BYTES, aria_label=label, dir="auto"
    )
