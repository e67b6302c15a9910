"""Serves the files of checkpoints over HTTP, by their hashes, to policy servers on other machines (`trainspan weights`)."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, read_latest
from trainspan_schemas.artifacts.checkpoint_files import CHECKPOINT_NAME, CheckpointFiles, ListedFile
from trainspan_schemas.errors import CheckpointError

__all__ = ["CheckpointCatalog", "file_app", "serve_files"]

_MOST_CONNECTIONS: Final = 256
_KEEP_ALIVE_S: Final = 30

_App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class CheckpointCatalog:
    """The checkpoints below a folder. A file is hashed once, for as long as its size and time of change stay the same."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._hashed: dict[Path, tuple[int, int, str]] = {}
        self._by_hash: dict[str, Path] = {}

    def latest(self, policy: str | None) -> dict[str, Any] | None:
        """The checkpoint in service. Raises CheckpointError if `latest` names none that exists."""
        folder = read_latest(self._folder(policy))
        return None if folder is None else {"checkpoint": folder.name, "version": CheckpointMeta.read(folder).version}

    def files(self, checkpoint: str, policy: str | None) -> CheckpointFiles | None:
        """The files of a checkpoint; None if there is none of that name. Raises CheckpointError."""
        folder = self._folder(policy) / _checked(checkpoint)
        if not folder.is_dir() or folder.is_symlink():
            return None
        paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
        listed = {path.name: self._listed(path) for path in paths if CHECKPOINT_NAME.fullmatch(path.name)}
        return CheckpointFiles(checkpoint, CheckpointMeta.read(folder).version, listed)

    def path_of(self, sha256: str) -> Path | None:
        """A listed file with this hash; None if no list that was asked for has it, or if it has been deleted."""
        path = self._by_hash.get(sha256)
        return path if path is not None and path.is_file() else None

    def _folder(self, policy: str | None) -> Path:
        return self._root if policy is None else self._root / _checked(policy)

    def _listed(self, path: Path) -> ListedFile:
        state = path.stat()
        size, changed_ns, sha256 = self._hashed.get(path, (0, 0, ""))
        if (size, changed_ns) != (state.st_size, state.st_mtime_ns):
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self._hashed[path] = state.st_size, state.st_mtime_ns, sha256
        self._by_hash[sha256] = path
        return ListedFile(sha256, state.st_size)


def _checked(name: str) -> str:
    if not CHECKPOINT_NAME.fullmatch(name):
        raise CheckpointError(f"{name[:80]!r} is not the name of a checkpoint or policy")
    return name


def file_app(catalog: CheckpointCatalog, token: str) -> _App:
    """The ASGI application. Every request needs the token."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, Response
    from starlette.routing import Route

    def is_admitted(request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode())

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not is_admitted(request):
                return JSONResponse({"error": "this needs the token in $TRAINSPAN_HOME/token"}, 401)
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


def serve_files(root: Path, host: str, port: int, token: str, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM. Calls `on_ready` with the base URL. Raises OSError if the address cannot be used."""
    import socket

    import uvicorn

    config = uvicorn.Config(
        file_app(CheckpointCatalog(root), token),
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        log_level="warning",
        access_log=False,
        lifespan="off",
    )
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    shown = f"[{host}]" if ":" in host else host
    on_ready(f"http://{shown}:{listener.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listener])
