"""Serves the files of checkpoints over HTTP, by their hashes, to policy servers on other machines (`trainspan weights`).

Bounds what uvicorn does not: the number of connections, and the time that one may be silent. `limit_concurrency` of uvicorn
would answer 503 to everyone once connections without a token have used it up.
"""

import asyncio
import hashlib
import hmac
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, ClassVar, Final

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.artifacts.checkpoint_files import CHECKPOINT_NAME, CheckpointFiles, ListedFile
from trainspan_schemas.errors import CheckpointError
from trainspan_training.checkpoints.folder import accepted_checkpoint

__all__ = ["CheckpointCatalog", "file_app", "serve_files"]

_MOST_CONNECTIONS: Final = 256
_SILENT_S: Final = 20.0
"""Longest time that a connection may be without a request."""

_App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class CheckpointCatalog:
    """The checkpoints below a folder.

    Weights have the hashes in their `trainspan.json`, which the trainer computed while it wrote them. Other files are hashed
    once, by one thread, for as long as their size and time of change stay the same.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._hashed: dict[Path, tuple[int, int, str]] = {}
        self._by_hash: dict[str, dict[Path, None]] = {}
        """Hash → the files that have it: equal files of several checkpoints are deleted at different times."""
        self._hashing = threading.Lock()

    def latest(self, policy: str | None) -> dict[str, Any] | None:
        """The last checkpoint that a policy server has accepted; None if there is none. Raises CheckpointError."""
        folder = accepted_checkpoint(self._folder(policy))
        if folder is None:
            return None
        meta = CheckpointMeta.read(folder)
        return {"checkpoint": folder.name, "version": meta.version, "weights_sha256": meta.weights_sha256}

    def files(self, checkpoint: str, policy: str | None) -> CheckpointFiles | None:
        """The files of a checkpoint; None if there is none of that name. Raises CheckpointError."""
        folder = self._folder(policy) / _checked(checkpoint)
        if not folder.is_dir() or folder.is_symlink():
            return None
        paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
        meta = CheckpointMeta.read(folder)
        known = meta.weights_files or {}
        try:
            listed = {
                path.name: self._listed(path, known.get(path.name))
                for path in paths
                if CHECKPOINT_NAME.fullmatch(path.name)
            }
        except OSError as error:
            raise CheckpointError(f"cannot read {checkpoint}: {error}") from error
        return CheckpointFiles(checkpoint, meta.version, listed)

    def path_of(self, sha256: str) -> Path | None:
        """A listed file with this hash; None if no list that was asked for has it, or if it has been deleted."""
        return next((path for path in tuple(self._by_hash.get(sha256, ())) if path.is_file()), None)

    def _folder(self, policy: str | None) -> Path:
        return self._root if policy is None else self._root / _checked(policy)

    def _listed(self, path: Path, known: str | None) -> ListedFile:
        with self._hashing:
            state = path.stat()
            size, changed_ns, sha256 = self._hashed.get(path, (0, 0, ""))
            if (size, changed_ns) != (state.st_size, state.st_mtime_ns):
                sha256 = known or _hash(path)
                self._hashed[path] = state.st_size, state.st_mtime_ns, sha256
            self._by_hash.setdefault(sha256, {})[path] = None
        return ListedFile(sha256, state.st_size)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(name: str) -> str:
    if not CHECKPOINT_NAME.fullmatch(name):
        raise CheckpointError(f"{name[:80]!r} is not the name of a checkpoint or policy")
    return name


def file_app(catalog: CheckpointCatalog, token: str) -> _App:
    """The ASGI application. Every request needs the token; without it, the connection ends with the answer."""

    def is_admitted(request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode())

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not is_admitted(request):
                error = {"error": "this needs the token in $TRAINSPAN_HOME/token"}
                return JSONResponse(error, 401, {"Connection": "close"})
            try:
                return await answer(request)
            except CheckpointError as error:
                return JSONResponse({"error": str(error)}, 400)

        return endpoint

    async def latest(request: Request) -> Response:
        found = await run_in_threadpool(catalog.latest, request.query_params.get("policy"))
        return JSONResponse(found) if found else JSONResponse({"error": "there is no checkpoint yet"}, 404)

    async def files(request: Request) -> Response:
        name = request.path_params["checkpoint"]
        listed = await run_in_threadpool(catalog.files, name, request.query_params.get("policy"))
        if listed is None:
            return JSONResponse({"error": f"there is no checkpoint {name!r}"}, 404)
        return Response(listed.to_json(), media_type="application/json")

    async def file(request: Request) -> Response:
        path = catalog.path_of(request.path_params["sha256"])
        if path is None:
            return JSONResponse({"error": "no listed file has this hash: ask for the list of its checkpoint"}, 404)
        return FileResponse(path, media_type="application/octet-stream")

    return Starlette(
        routes=[
            Route("/latest", guarded(latest)),
            Route("/checkpoints/{checkpoint}", guarded(files)),
            Route("/files/{sha256}", guarded(file)),
        ]
    )


class _Connection(H11Protocol):
    """Closed if no request begins in time. If there are too many, the one that has been silent the longest is closed."""

    _silent: ClassVar[dict["_Connection", asyncio.TimerHandle]] = {}
    """Connections without a request, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > _MOST_CONNECTIONS:
            oldest = next(iter(self._silent))
            oldest._stop_waiting()
            oldest.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering():  # else the next request has already arrived
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._stop_waiting()
        self._silent[self] = self.loop.call_later(_SILENT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if (timer := self._silent.pop(self, None)) is not None:
            timer.cancel()


def serve_files(root: Path, host: str, port: int, token: str, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM. Calls `on_ready` with the base URL. Raises OSError if the address cannot be used."""
    config = uvicorn.Config(
        file_app(CheckpointCatalog(root), token),
        http=_Connection,
        ws="none",
        timeout_graceful_shutdown=5,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
    shown = f"[{host}]" if ":" in host else host
    on_ready(f"http://{shown}:{listener.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listener])
