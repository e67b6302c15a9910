"""The web application: connects addresses with models and pages. It sends only labels; nothing it serves comes from a file's path."""

import asyncio
import getpass
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import unquote, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainspan_schemas.errors import TrainspanError, UsageError
from trainspan_viewer.html.document import Page, served, static_file
from trainspan_viewer.html.elements import element, link
from trainspan_viewer.pages.labels import Desk, labels_part, render_pair, render_queue
from trainspan_viewer.queries.labels.pair import load_pair
from trainspan_viewer.queries.labels.queue import load_queue, next_address, queue_of
from trainspan_viewer.queries.labels.sending import LabelSender, give_label
from trainspan_viewer.queries.labels.stored import labels_on, stored_labels
from trainspan_viewer.queries.labels.subject import Subject
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError
from trainspan_viewer.queries.requests.explain_request import CREDIT_SETTINGS
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.server.guard import HEADERS, Guard
from trainspan_viewer.server.routes import ROUTES, View
from trainspan_viewer.server.waiting import Waiting, Work
from trainspan_viewer.server.writing import writing_routes

__all__ = ["make_app"]

log = logging.getLogger(__name__)

_AT_ONCE: Final = 4
"""Pages that are made at the same time; others wait."""
_SLOW_AT_ONCE: Final = 2
"""The same for answers whose work the reader chooses: searches, and credit that is recomputed. Other pages do not wait for them."""
_CLOSED: Final = 499
_MOST_BYTES: Final = 1_000_000
"""Of one page. Pages bound what they show; this holds whatever they forgot."""
_STATIC: Final = {
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.png": "image/png",
}
_VERSION: Final = hashlib.sha256(b"".join(static_file(name) for name in _STATIC)).hexdigest()[:12]

_AGREEMENT: Final = "/judges"
"""A page that compares all ratings of the store."""
_CREDIT: Final = frozenset(knob.name for knob in CREDIT_SETTINGS)
_WORK: Final = _CREDIT | {"text"}
"""Parameters that make a page recompute credit or search all answers: another site's link may not start that by itself."""

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(sources: Sources, sender: LabelSender, guard: Guard, *, page_wait_s: float) -> ASGIApp:
    """The application with all routes behind the guard. A browser waits `page_wait_s` for a page that takes longer."""
    desks = _Desks(sender, guard)
    turns = _Turns(asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_SLOW_AT_ONCE), Waiting(page_wait_s))
    routes = [Route("/static/{name}", _static), Route("/labels/next", _next(sources, turns))]
    views = (*ROUTES, *_label_views(desks))
    routes += writing_routes(
        lambda sent: give_label(sent, sources.store, sender),
        guard,
        lambda page, status: _html(served(page, _VERSION), status),
    )
    routes += [Route(view.path, _endpoint(view, sources, desks, turns)) for view in views]
    return _Guarded(
        Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found, Exception: _failed}), guard
    )


@dataclass(frozen=True, slots=True)
class _Turns:
    """How many answers are made at the same time."""

    plain: asyncio.Semaphore
    slow: asyncio.Semaphore
    waiting: Waiting

    def of(self, view: View, params: Params) -> asyncio.Semaphore:
        return self.slow if _is_work(view, params.query) else self.plain


def _is_work(view: View, query: Mapping[str, object]) -> bool:
    """Whether the page recomputes, searches or compares much."""
    return view.path == _AGREEMENT or bool(_WORK & query.keys())


@dataclass(frozen=True, slots=True)
class _Desks:
    """What forms need."""

    sender: LabelSender
    guard: Guard

    def of(self, params: Params) -> Desk:
        """For a page at this address."""
        return Desk(
            self.guard.form_token if self.guard.may_write else None,
            params.link(),
            _user(),
            self.sender.obstacle(),
            queue_of(params),
        )


def _endpoint(view: View, sources: Sources, desks: _Desks, turns: _Turns) -> Endpoint:
    def answer(params: Params) -> Response:
        try:
            model = view.load(sources, params)
            page = view.render(model)
            if (subject := view.subject(model)) is not None:
                page = _with_labels(page, subject, sources, desks.of(params))
        except NotFoundError as error:
            return _error_page(404, "Not found", str(error))
        except UsageError as error:
            return _error_page(400, "Not understood", str(error))
        except TrainspanError as error:
            return _error_page(503, "Not readable", str(error))
        except OSError as error:  # a checkpoint or dataset was replaced or deleted meanwhile, or cannot be read
            return _error_page(503, "Not readable", f"{error}: if it changed while this page was made, load it again")
        text = served(page, _VERSION)
        size = len(text.encode())
        if size > _MOST_BYTES:
            message = f"This page would have {size / 1e6:.1f} MB; at most {_MOST_BYTES / 1e6:.0f} MB are sent."
            return _error_page(503, "Too large", message)
        return _html(text)

    async def respond(request: Request, work: Work | None) -> Response:
        query = {name: request.query_params.getlist(name) for name in request.query_params}
        path = {name: unquote(str(value)) for name, value in request.path_params.items()}
        params = Params(request.url.path, path, query)
        async with turns.of(view, params):
            is_gone = not work.is_wanted if work else await request.is_disconnected()  # while it waited for its turn
            return Response(status_code=_CLOSED) if is_gone else await run_in_threadpool(answer, params)

    async def endpoint(request: Request) -> Response:
        query, waiting = request.query_params, turns.waiting
        address = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
        if request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate":
            if desks.guard.is_foreign(request.headers):  # may not be answered like the reader's own
                return _foreign_page(address) if _is_work(view, query) else await respond(request, None)
            return await waiting.navigate(address, lambda work: respond(request, work)) or _waiting_page(address)
        whole = await waiting.join(address) or await respond(request, None)
        if whole.headers.get("etag") and request.headers.get("if-none-match") == whole.headers["etag"]:
            return Response(status_code=304, headers={"etag": whole.headers["etag"]})
        return whole

    return endpoint


def _label_views(desks: _Desks) -> tuple[View, ...]:
    """The pages that need the guard's token or the state of the way to the collector."""
    return (
        View("/labels", lambda sources, params: load_queue(sources, params, desks.sender.obstacle()), render_queue),
        View("/labels/pair", load_pair, lambda model: render_pair(model, desks.of(model.params))),
    )


def _next(sources: Sources, turns: _Turns) -> Endpoint:
    """Leads on to the next item of the queue."""

    async def endpoint(request: Request) -> Response:
        query = {name: request.query_params.getlist(name) for name in request.query_params}
        try:
            async with turns.plain:
                address = await run_in_threadpool(next_address, sources, Params("/labels/next", {}, query))
        except UsageError as error:
            return _error_page(400, "Not understood", str(error))
        except TrainspanError as error:
            return _error_page(503, "Not readable", str(error))
        return RedirectResponse(address, 303, {"cache-control": "no-store"})

    return endpoint


def _with_labels(page: Page, subject: Subject, sources: Sources, desk: Desk) -> Page:
    """The page with the labels on what it shows; it stays readable if they are not."""
    labels, error = [], ""
    try:
        labels = stored_labels(sources.store, [rollout_id for rollout_id, _ in subject.rollouts])
    except TrainspanError as problem:
        error = f"labels cannot be read: {problem}"
    part = labels_part(subject, *labels_on(labels, subject), desk, error)
    return replace(page, body=[part, *page.body])


def _user() -> str:
    """The user of this process, who labels if the person says nothing else."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return f"uid {os.getuid()}"


def _html(text: str, status: int = 200) -> Response:
    content = text.encode()
    # A page asks for itself again while it is viewed; the tag saves the transfer if nothing has changed.
    headers = {"cache-control": "no-store", "etag": f'"{hashlib.sha256(content).hexdigest()[:24]}"'}
    return Response(content, status, headers, media_type="text/html; charset=utf-8")


def _waiting_page(address: str) -> Response:
    """Stands for a page that is being made; the script loads that when it is ready."""
    body = [
        element("p", "The store is being read…", element("progress"), id="waiting", role="status"),
        element("noscript", link(address, "Look again")),
    ]
    return _html(served(Page("One moment", body, is_waiting=True), _VERSION))


def _foreign_page(address: str) -> Response:
    """Stands for a page that would start work of another site's choice."""
    body = [
        element("p", "Another site led here, to a page that computes or searches something.", role="status"),
        element("p", link(address, "Open it")),
    ]
    return _html(served(Page("Open this page?", body), _VERSION))


def _error_page(status: int, title: str, message: str) -> Response:
    body = [element("p", message, class_="bad"), element("p", link("/", "All runs"))]
    return _html(served(Page(title, body), _VERSION), status)


async def _not_found(request: Request, error: Exception) -> Response:
    return _error_page(404, "Not found", f"no page at {request.url.path[:200]}")


async def _failed(request: Request, error: Exception) -> Response:
    """The server logs the error with its traceback."""
    message = f"This page failed: {type(error).__name__}. The log of `trainspan view` has the details."
    return _error_page(500, "It failed", message)


async def _static(request: Request) -> Response:
    name = str(request.path_params["name"])
    if name not in _STATIC:
        return _error_page(404, "Not found", f"no file {name[:200]!r}")
    cache_control = "public, max-age=31536000, immutable" if request.query_params.get("v") == _VERSION else "no-cache"
    return Response(static_file(name), headers={"content-type": _STATIC[name], "cache-control": cache_control})


class _Guarded:
    """Lets requests through to the application as the guard says, and adds the headers."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        # Names in paths may contain an encoded slash: routes see the path as it was sent, and names are decoded afterwards.
        scope = {**scope, "path": scope["raw_path"].decode("latin-1")}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        answer = self._answer(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        guard, headers = self._guard, request.headers
        if refused := guard.refusal(request.method, headers):
            return Response(refused.message + "\n", refused.status, media_type="text/plain")
        if (key := request.query_params.get("key")) is not None and guard.opens(key):
            others = [(name, value) for name, value in request.query_params.multi_items() if name != "key"]
            url = URL(request.scope["path"]).replace(query=urlencode(others))
            return RedirectResponse(str(url), 303, {"set-cookie": guard.set_cookie, "cache-control": "no-store"})
        # Not `request.url`, which is made from the Host header: routes see the scope's path.
        if request.scope["path"].startswith("/static/") or guard.admits(headers):
            return None
        message = (
            "This needs a key: open the address that `trainspan view` printed since its last start, "
            "or send `Authorization: Bearer TOKEN`."
        )
        page = _error_page(401, "Who is there?", message)
        page.headers["www-authenticate"] = "Bearer"
        return page
