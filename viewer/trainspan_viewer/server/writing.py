"""Requests that write: the forms of the pages that give labels, which the collector stores.

The guard has already refused other sites' pages and those without a token. A form also proves that it is the server's own: another
origin's page cannot read the token in it. A label overrides a judge, so the reader's token, which opens the pages, gives none.
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
from trainspan_viewer.pages.labels import refused_label
from trainspan_viewer.queries.labels.sending import LabelChangedError, NotShownError
from trainspan_viewer.queries.labels.submission import Submission
from trainspan_viewer.queries.paths import NotFoundError
from trainspan_viewer.server.guard import Guard

__all__ = ["writing_routes"]

_MOST_BODY: Final = 64 * 1024
_BODY_S: Final = 20.0
_FORM: Final = "application/x-www-form-urlencoded"
_STATUS: Final = (
    (UsageError, HTTPStatus.BAD_REQUEST),
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (LabelChangedError, HTTPStatus.CONFLICT),
)
"""Error → status; any other is one of the collector or the store."""

Answer = Callable[[Page, int], Response]
Give = Callable[[Submission], None]


def writing_routes(give: Give, guard: Guard, answer: Answer) -> list[Route]:
    """`give` sends the label of a form; `answer` makes the answer from a page and a status."""

    async def endpoint(request: Request) -> Response:
        return await _answered(request, give, guard, answer)

    return [Route("/labels", endpoint, methods=["POST"])]


async def _answered(request: Request, give: Give, guard: Guard, answer: Answer) -> Response:
    def refuse(status: HTTPStatus, reason: str, text: str = "") -> Response:
        return answer(refused_label(reason, text), int(status))

    if not guard.may_write:
        why = "it has no key ([view] open_to_all)" if guard.is_open else "it was started with --read-only"
        return refuse(HTTPStatus.FORBIDDEN, f"This server takes no labels: {why}.")
    if not guard.admits_labels(request.headers):
        return refuse(
            HTTPStatus.FORBIDDEN, "The reader's token gives no labels: use the printed address, or the runner's token."
        )
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        return refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"A label is sent as {_FORM}.")
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
    if not guard.made_form(sent.token):
        reason = (
            "The form is not of this server, or from before its last start: load the page again and send it from there."
        )
        return refuse(HTTPStatus.FORBIDDEN, reason, sent.text)
    try:
        await run_in_threadpool(give, sent)
    except NotShownError as error:
        page = refused_label(f"{error}.", sent.text, "The label is stored, but not shown")
        return answer(page, int(HTTPStatus.SERVICE_UNAVAILABLE))
    except TrainspanError as error:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.SERVICE_UNAVAILABLE)
        return refuse(status, f"{error}.", sent.text)
    return RedirectResponse(f"{sent.page}#labels", 303, {"cache-control": "no-store"})


async def _body(request: Request) -> bytes | None:
    """The content; None if it is too long."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BODY:
            return None
        parts.append(part)
    return b"".join(parts)
