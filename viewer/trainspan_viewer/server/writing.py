"""Requests that write: forms of the pages that add, change and delete notes.

The guard has already refused other sites' pages and those without a token. A form also proves that it is the server's own: another
origin's page cannot read the token in it.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from trainspan_schemas.errors import TrainspanError, UsageError
from trainspan_viewer.html.document import Page
from trainspan_viewer.pages.notes import refused_note
from trainspan_viewer.queries.notes.note_file import NoteChangedError, NoteFile
from trainspan_viewer.queries.notes.submission import Submission
from trainspan_viewer.server.guard import Guard

__all__ = ["writing_routes"]

_MOST_BODY: Final = 64 * 1024
_BODY_S: Final = 20.0
_FORM: Final = "application/x-www-form-urlencoded"

Answer = Callable[[Page, int], Response]


def writing_routes(notes: NoteFile, guard: Guard, answer: Answer) -> list[Route]:
    """`answer` makes the answer from a page and a status."""

    def add(_: Request, sent: Submission) -> None:
        notes.add(sent.draft)

    def change(request: Request, sent: Submission) -> None:
        notes.change(request.path_params["note"], sent.seen_ns, sent.text)

    def delete(request: Request, sent: Submission) -> None:
        notes.delete(request.path_params["note"], sent.seen_ns)

    def route(path: str, act: Callable[[Request, Submission], None]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _answered(request, act, guard, answer)

        return Route(path, endpoint, methods=["POST"])

    return [route("/notes", add), route("/notes/{note:int}", change), route("/notes/{note:int}/delete", delete)]


async def _answered(
    request: Request, act: Callable[[Request, Submission], None], guard: Guard, answer: Answer
) -> Response:
    def refuse(status: HTTPStatus, reason: str, text: str = "") -> Response:
        return answer(refused_note(reason, text), int(status))

    if not guard.may_write:
        why = "it has no key ([view] open_to_all)" if guard.is_open else "it was started with --read-only"
        return refuse(HTTPStatus.FORBIDDEN, f"This server takes no notes: {why}.")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        return refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"A note is sent as {_FORM}.")
    try:
        async with asyncio.timeout(_BODY_S):
            body = await _body(request)
    except (TimeoutError, ClientDisconnect):
        return refuse(HTTPStatus.REQUEST_TIMEOUT, f"The form did not arrive within {_BODY_S:g} s.")
    if body is None:
        return refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The form has more than {_MOST_BODY} bytes.")
    try:
        sent = Submission.of_body(body)
    except UsageError as error:
        return refuse(HTTPStatus.BAD_REQUEST, str(error))
    if not guard.made_form(sent.fields.get("token", "")):
        reason = (
            "The form is not of this server, or from before its last start: load the page again and send it from there."
        )
        return refuse(HTTPStatus.FORBIDDEN, reason, sent.text)
    try:
        await run_in_threadpool(act, request, sent)
    except UsageError as error:
        return refuse(HTTPStatus.BAD_REQUEST, f"{error}.", sent.text)
    except NoteChangedError as error:
        return refuse(HTTPStatus.CONFLICT, f"{error}.", sent.text)
    except TrainspanError as error:
        return refuse(HTTPStatus.INSUFFICIENT_STORAGE, f"{error}.", sent.text)
    return RedirectResponse(f"{sent.back}#notes", 303, {"cache-control": "no-store"})


async def _body(request: Request) -> bytes | None:
    """The content; None if it is too long."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BODY:
            return None
        parts.append(part)
    return b"".join(parts)
